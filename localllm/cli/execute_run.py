"""What `localllm run` does with its flags: asks a running server that has the model, or loads it here.

A server's first token should be here at once, so nothing is imported that only loading needs, nor what reads
flags.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from localllm.cli import io
from localllm.cli.answer import AnswerOptions, print_answer, text_or_messages
from localllm.cli.flags import GRAMMAR_FLAGS, parse_grammar_flags, parse_sampling_fields, parse_template_args
from localllm.cli.machine import connect_or_load
from localllm.errors import UsageError
from localllm.request import ChatRequest

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
        prompt = text_or_messages(llm, text, system, raw=raw, with_tools=functions is not None)
        params = dataclasses.replace(llm.default_params, **given)
        print_answer(llm, ChatRequest(prompt, params, functions, arguments), show, out)


def _start_conversation(flags: Mapping[str, Any], given: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """given: fields of SamplingParams; arguments: of the template."""
    # 0.1 s each, that one answer need not wait for.
    from localllm.cli.in_app import open_session, run_app

    def begin(llm: "Model") -> "Session":
        return open_session(llm, flags, given, llm.template_arguments(arguments, think=flags["think"]))

    if not flags["plain"]:
        run_app(flags, begin)
        return
    from localllm.cli import repl

    with closing(connect_or_load(flags)) as llm:
        repl.run_repl(begin(llm))


def _refuse_single_answer_flags(flags: Mapping[str, Any]) -> None:
    for name, flag in SINGLE_ANSWER_FLAGS.items():
        if flags[name] is not None and flags[name] is not False:
            raise UsageError(f"{flag} is for one answer, and there is no prompt", "add a prompt")
