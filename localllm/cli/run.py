"""`localllm run`: one answer to a prompt, or a conversation where there is none. `execute_run.py` does it."""

from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.execute_run import execute_run


def run(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    system: Annotated[
        str | None,
        options.option(text="System prompt: how the model should behave.", metavar="TEXT"),
    ] = None,
    resume: Annotated[
        str | None,
        options.option(text="Go on with a conversation of `localllm chats`; `last` is the newest.", metavar="ID"),
    ] = None,
    raw: Annotated[
        bool,
        options.switch("--raw", text="Continue the prompt as it is, without chat template."),
    ] = False,
    think: options.Think = None,
    tools: options.Tools = None,
    template_arg: options.TemplateArgs = None,
    schema: options.Schema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    grammar: options.GrammarFile = None,
    choice: options.Choice = None,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    quant: options.Quant = None,
    deterministic: options.Deterministic = False,
    draft_model: options.DraftModel = None,
    force: Annotated[
        bool, options.switch("--force", text="Also a model that does not fit into the free memory.")
    ] = False,
    server: options.Server = None,
    local: Annotated[
        bool, options.switch("--local", text="Load the model here, also where a server has it.")
    ] = False,
    plain: Annotated[bool, options.switch("--plain", text="Talk line by line, without the app.")] = False,
    as_json: options.Json = False,
    receipt: Annotated[
        str | None,
        options.option("--receipt", text="Write what `localllm replay` needs, prompt and all.", metavar="FILE"),
    ] = None,
    draft: options.Draft = None,
    verbose: Annotated[bool, options.switch("--verbose", text="Print all measurements to stderr.")] = False,
    fail_on_length: Annotated[
        bool,
        options.switch("--fail-on-length", text="Exit with 6 if a limit cut the answer."),
    ] = False,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    repeat_last_n: options.RepeatLastN = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    stop_ids: options.StopIds = None,
    ignore_eos: options.IgnoreEos = None,
) -> None:
    """Answer a prompt, or start a conversation.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; one that is not on
    this machine is pulled first. The prompt is PROMPT, or what is piped in, or both, the piped text first. stdout
    gets the model's answer and nothing else; what it thinks before goes to stderr. In a terminal and without a
    prompt, a conversation begins; without MODEL one is chosen first.

    A running server that has the model loaded answers instead (LOCALLLM_HOST, else port 11434 of this machine),
    which spares the loading; --verbose tells. Flags that say how to load a model (--context, --device, --dtype,
    --kv-dtype, --quant, --deterministic, --draft, --draft-model, --force) load it here.
    """
    execute_run(ctx.params)
