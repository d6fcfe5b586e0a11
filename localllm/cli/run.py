"""`localllm run`: one answer to a prompt, or a conversation where there is none."""

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Any

import typer

from localllm.cli import io, options
from localllm.cli.answer import Question, Show, answer
from localllm.cli.constrain import FLAGS_OF_GRAMMAR, asked_grammar
from localllm.cli.loading import load_model
from localllm.cli.receipts import path_for
from localllm.errors import UsageError

FLAGS_OF_ONE_ANSWER = {
    **FLAGS_OF_GRAMMAR,
    "raw": "--raw",
    "tools": "--tools",
    "as_json": "--json",
    "receipt": "--receipt",
    "fail_on_length": "--fail-on-length",
    "draft": "--draft",
    "logprobs": "--logprobs",
    "prompt_logprobs": "--prompt-logprobs",
}


def run(
    ctx: typer.Context,
    model: options.ModelName,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    system: Annotated[
        str | None,
        options.option(text="System prompt: how the model should behave.", metavar="TEXT"),
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
    prompt, a conversation begins.
    """
    given = options.sampling_fields({**ctx.params, "grammar": asked_grammar(ctx.params)})
    arguments = options.parse_template_args(template_arg or [])
    if raw and system:
        raise UsageError("--raw sends no system prompt", "leave out --raw or --system")
    if raw and (arguments or tools or think is not None):
        raise UsageError("--raw uses no chat template", "leave out --raw, or --think, --tools and --template-arg")
    if tools and "grammar" in given:
        raise UsageError("a grammar leaves no room for calls of tools", "leave out one of them")
    if draft_model and draft is False:
        raise UsageError("--no-draft guesses nothing, and --draft-model guesses", "leave out one of them")
    where = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
    where |= {"force": force, "deterministic": deterministic, "verbose": verbose, "draft_model": draft_model}
    where["draft"] = None if draft is None else "lookup" if draft else "off"
    if not prompt and io.both_ends_are_terminals():
        _refuse_flags_of_one_answer(ctx.params)
        from localllm.cli.repl import converse  # prompt_toolkit: 0.1 s that one answer need not wait for

        with closing(load_model(model, **where)) as llm:
            arguments = llm.template_arguments(arguments, think=think)
            converse(llm, dataclasses.replace(llm.default_params, **given), system, arguments, verbose=verbose)
    else:
        if (logprobs, prompt_logprobs) != (None, None) and not as_json:
            raise UsageError("log probabilities are part of the JSON output", "add --json")
        functions = io.read_tools(tools) if tools else None
        text = io.read_prompt(prompt or [], raw=raw)
        out = io.AnswerWriter()
        show = Show(raw, as_json, verbose, fail_on_length, path_for(receipt) if receipt else None, bool(draft))
        with closing(load_model(model, **where, grammar=given.get("grammar"))) as llm:
            arguments = llm.template_arguments(arguments, think=think, with_tools=functions is not None)
            question = Question(text, system, functions, arguments)
            answer(llm, question, dataclasses.replace(llm.default_params, **given), show, out)


def _refuse_flags_of_one_answer(flags: Mapping[str, Any]) -> None:
    for name, flag in FLAGS_OF_ONE_ANSWER.items():
        if flags[name] is not None and flags[name] is not False:
            raise UsageError(f"{flag} is for one answer, and there is no prompt", "add a prompt")
