"""Declaration of `localllm run`, which `execute_run.py` executes."""

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
        options.option(text="System prompt.", metavar="TEXT", panel=options.Panel.PROMPT),
    ] = None,
    resume: Annotated[
        str | None,
        options.option(
            text="Resume a saved conversation of `localllm chats`; `last` is the newest.",
            metavar="ID",
            panel=options.Panel.PROMPT,
        ),
    ] = None,
    raw: Annotated[
        bool,
        options.switch(
            "--raw", text="Complete the prompt verbatim, without a chat template.", panel=options.Panel.PROMPT
        ),
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
    activations: options.Activations = None,
    quant: options.Quant = None,
    keep_layout: options.KeepLayout = False,
    tensor_parallel: options.TensorParallel = None,
    pipeline_parallel: options.PipelineParallel = None,
    expert_parallel: options.ExpertParallel = False,
    workers: options.Workers = None,
    token_file: options.TokenFile = None,
    deterministic: options.Deterministic = False,
    draft_model: options.DraftModel = None,
    force: options.ForceLoad = False,
    cache_dir: options.CacheDir = None,
    cache_size: options.CacheSize = None,
    server: options.Server = None,
    local: Annotated[
        bool,
        options.switch(
            "--local",
            text="Load the model in this process even if a server has it loaded.",
            panel=options.Panel.MODEL,
        ),
    ] = False,
    plain: Annotated[
        bool,
        options.switch(
            "--plain", text="Chat line by line instead of in the full-screen app.", panel=options.Panel.OUTPUT
        ),
    ] = False,
    as_json: options.Json = False,
    receipt: Annotated[
        str | None,
        options.option(
            "--receipt",
            text="Write a receipt, including the prompt, for `localllm replay`.",
            metavar="FILE",
            panel=options.Panel.ADVANCED,
        ),
    ] = None,
    draft: options.Draft = None,
    verbose: Annotated[
        bool,
        options.switch(
            "--verbose", text="Print load and generation statistics to stderr.", panel=options.Panel.OUTPUT
        ),
    ] = False,
    fail_on_length: Annotated[
        bool,
        options.switch(
            "--fail-on-length",
            text="Exit with code 6 if a length limit truncates the answer.",
            panel=options.Panel.OUTPUT,
        ),
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
    min_tokens: options.MinTokens = None,
    stop: options.Stop = None,
    stop_ids: options.StopIds = None,
    ignore_eos: options.IgnoreEos = None,
) -> None:
    """Answer a prompt or start a conversation.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file; a model that is not
    on this machine is downloaded first. The prompt is PROMPT, the text piped to stdin, or both, with the piped
    text first. stdout gets only the answer; reasoning goes to stderr. In a terminal and without a prompt, a
    conversation starts; without MODEL, you choose one first.

    If a running server (LOCALLLM_HOST, the background server, or port 11434 of this machine) has the model loaded,
    it answers instead and no loading is needed; --verbose shows this. With LOCALLLM_BACKGROUND=5m, a server is
    started in the background for that, and ends after 5 minutes without requests. Loading flags (--context,
    --device, --dtype, --kv-dtype, --quant, --keep-layout, --tensor-parallel, --deterministic, --draft,
    --draft-model, --force, --cache-dir) load the model in this process.
    """
    execute_run(ctx.params)
