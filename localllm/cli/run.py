"""`localllm run`: one answer to a prompt, or a conversation where there is none. `asking.py` does it."""

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import io, options
from localllm.cli.answer import AnswerOptions, AnswerRequest, print_answer
from localllm.cli.flags import GRAMMAR_FLAGS, parse_grammar_flags, parse_sampling_fields, parse_template_args
from localllm.cli.machine import connect_or_load
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.conversation.session import Session
    from localllm.protocol.model import Model

NO_MODEL_REMEDY = "name one: `localllm list --all` shows them, `localllm run demo` needs no download"
SINGLE_ANSWER_FLAGS = {
    **GRAMMAR_FLAGS,
    "raw": "--raw",
    "tools": "--tools",
    "as_json": "--json",
    "receipt": "--receipt",
    "fail_on_length": "--fail-on-length",
    "draft": "--draft",
    "logprobs": "--logprobs",
    "prompt_logprobs": "--prompt-logprobs",
}


def execute_run(flags: Mapping[str, Any]) -> None:
    """flags: by the names of `run`'s parameters, None or False where they were not given. Raises LocalLLMError."""
    converses = not flags["prompt"] and io.is_interactive()
    if flags["model"] is None and (flags["plain"] or not converses):  # else the app helps to choose one
        raise UsageError("no model is named", NO_MODEL_REMEDY)
    given = parse_sampling_fields({**flags, "grammar": parse_grammar_flags(flags)})
    arguments = parse_template_args(flags["template_arg"] or [])
    raw, tools, think, system, verbose = (flags[name] for name in ("raw", "tools", "think", "system", "verbose"))
    if raw and system:
        raise UsageError("--raw sends no system prompt", "leave out --raw or --system")
    if raw and (arguments or tools or think is not None):
        raise UsageError("--raw uses no chat template", "leave out --raw, or --think, --tools and --template-arg")
    if tools and "grammar" in given:
        raise UsageError("a grammar leaves no room for calls of tools", "leave out one of them")
    if flags["draft_model"] and flags["draft"] is False:
        raise UsageError("--no-draft guesses nothing, and --draft-model guesses", "leave out one of them")
    if converses:
        _refuse_single_answer_flags(flags)
        _start_conversation(flags, given, arguments)
        return
    if flags["plain"]:
        raise UsageError("--plain is for conversations, and here is one question", "leave out one of them")
    if flags["resume"]:
        raise UsageError("--resume goes on with a conversation, and here is one question", "leave out one of them")
    if (flags["logprobs"], flags["prompt_logprobs"]) != (None, None) and not flags["as_json"]:
        raise UsageError("log probabilities are part of the JSON output", "add --json")
    functions = io.read_tools(tools) if tools else None
    text = io.read_prompt(flags["prompt"] or [], raw=raw)
    out = io.StdoutWriter()
    receipt = io.receipt_path(flags["receipt"]) if flags["receipt"] else None
    show = AnswerOptions(raw, flags["as_json"], verbose, flags["fail_on_length"], receipt, bool(flags["draft"]))
    with closing(connect_or_load(flags, given.get("grammar"))) as llm:
        arguments = llm.template_arguments(arguments, think=think, with_tools=functions is not None)
        question = AnswerRequest(text, system, functions, arguments)
        print_answer(llm, question, dataclasses.replace(llm.default_params, **given), show, out)


def _start_conversation(flags: Mapping[str, Any], given: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """given: fields of SamplingParams; arguments: of the template."""
    # 0.1 s each, that one answer need not wait for.
    from localllm.cli import in_app
    from localllm.cli.in_app import open_session

    def begin(llm: "Model") -> "Session":
        return open_session(llm, flags, given, llm.template_arguments(arguments, think=flags["think"]))

    if not flags["plain"]:
        in_app.run_app(flags, begin)
        return
    from localllm.cli import repl

    with closing(connect_or_load(flags)) as llm:
        repl.run_repl(begin(llm))


def _refuse_single_answer_flags(flags: Mapping[str, Any]) -> None:
    for name, flag in SINGLE_ANSWER_FLAGS.items():
        if flags[name] is not None and flags[name] is not False:
            raise UsageError(f"{flag} is for one answer, and there is no prompt", "add a prompt")


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
