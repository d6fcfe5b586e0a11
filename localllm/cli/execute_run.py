"""What `localllm run` does with its flags: asks a running server that has the model, or loads it here.

A server's first token should be here at once, so nothing is imported that only loading needs, nor what reads
flags.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from localllm.cli import io
from localllm.cli.answer import AnswerOptions, print_answer, text_or_messages
from localllm.cli.exits import die_by_signal
from localllm.cli.io import clear_sign_of_life, is_terminal
from localllm.cli.machine import LocalMachine, connect_or_load
from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from localllm.errors import LocalLLMError, UsageError
from localllm.files import parse_strict_json
from localllm.protocol.model import Model
from localllm.request import ChatRequest, Grammar, GrammarKind, SamplingParams
from localllm.sampling import parse_logit_bias
from localllm.settings import Settings

# The conversation in the app: whether this terminal can show it, and what the program leaves behind.


# The conversation that `localllm run` holds: a new one, or a kept one that it goes on with.
def open_session(
    llm: Model, flags: Mapping[str, Any], given: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Session:
    """given: fields of SamplingParams; arguments: of the template. What was given as a flag also holds for a kept
    conversation, whose own the rest is. Raises UsageError where there is none such."""
    chat = Chat(llm, dataclasses.replace(llm.default_params, **given), flags["system"], arguments)
    session = Session(llm, chat, Settings.from_environment().home / "chats", flags["verbose"])
    if flags["resume"]:
        session.load(flags["resume"])
        chat.params = dataclasses.replace(chat.params, **given)
        chat.template_arguments |= arguments
        chat.system = flags["system"] or chat.system
    return session


MIN_COLUMNS, MIN_LINES = 40, 12  # the smallest window that the app is of use in
PLAIN_REMEDY = "--plain talks line by line"


def check_terminal() -> None:
    """Raises UsageError for one that the app cannot be shown in."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        raise UsageError("this terminal (TERM=dumb) cannot show the app", PLAIN_REMEDY)
    if not is_terminal(sys.stderr):
        raise UsageError("the app is drawn on stderr, which is no terminal", f"leave it there; {PLAIN_REMEDY}")
    columns, lines = shutil.get_terminal_size()
    if columns < MIN_COLUMNS or lines < MIN_LINES:
        room = f"the app needs {MIN_COLUMNS}x{MIN_LINES} cells and the window has {columns}x{lines}"
        raise UsageError(room, f"make it larger; {PLAIN_REMEDY}")


def run_app(flags: Mapping[str, Any], begin: Callable[[Model], Session]) -> None:
    """Hold a conversation until the person leaves; flags: those of `run`.

    Raises UsageError where the terminal cannot show it, and what kept a model from being ready. A signal that
    asks the program to end does that, when the terminal is as it was before.
    """
    check_terminal()
    clear_sign_of_life()
    from localllm.tui.app import ChatApp  # 0.2 s that whoever cannot see it need not wait for

    app = ChatApp(LocalMachine(flags), flags["model"], begin, Settings.from_environment().home)
    app.run()
    if app.exit_signal:
        die_by_signal(app.exit_signal)
    if app.error:
        raise app.error
    if app.return_code:
        raise LocalLLMError("the app has ended before its time", "what it says above shows where")


# What becomes of flags: fields of SamplingParams and arguments of templates. Knows not how they are read.

# The flags that say what an answer must be, and their way into a `Grammar`.
GRAMMAR_FLAGS = {
    "schema": "--schema",
    "json_object": "--json-object",
    "regex": "--regex",
    "grammar": "--grammar",
    "choice": "--choice",
}
_LARK_START = re.compile(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:))", re.MULTILINE)
_GBNF_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)


def parse_grammar_flags(flags: Mapping[str, Any]) -> Grammar | None:
    """What the flags ask for; None without one. Raises UsageError for two of them, a file that cannot be read, and
    what `Grammar` refuses."""
    asked = [name for name in GRAMMAR_FLAGS if flags[name] not in (None, False)]
    if len(asked) > 1:
        both = " and ".join(GRAMMAR_FLAGS[name] for name in asked)
        raise UsageError(f"{both} are for two different answers", "give one of them")
    for name in asked:
        match name:
            case "schema":
                return Grammar(GrammarKind.JSON_SCHEMA, io.read_text(flags[name]))
            case "json_object":
                return Grammar(GrammarKind.JSON)
            case "regex":
                return Grammar(GrammarKind.REGEX, flags[name])
            case "grammar":
                return _grammar_from_text(io.read_text(flags[name]), io.display_name(flags[name]))
            case _:
                return Grammar(GrammarKind.CHOICE, _choices_json(flags[name]))
    return None


def _grammar_from_text(text: str, file_name: str) -> Grammar:
    """Lark begins with `start:`, GBNF with `root ::=`."""
    if _GBNF_ROOT.search(text):
        return Grammar(GrammarKind.GBNF, text)
    if _LARK_START.search(text):
        return Grammar(GrammarKind.LARK, text)
    raise UsageError(
        f"{file_name} is neither a Lark nor a GBNF grammar", "begin it with `start:` or with `root ::=`"
    )


def _choices_json(text: str) -> str:
    """`a,b,c`, or a JSON array for texts with commas."""
    return text if text.lstrip().startswith("[") else json.dumps([part.strip() for part in text.split(",")])


def parse_sampling_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of SamplingParams that were given as flags; `flags` may hold others.

    Raises UsageError where a value is wrong, so that no model is loaded for nothing.
    """
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    fields = {name: flags[name] for name in names if flags.get(name) not in (None, [], ())}
    if "logit_bias" in fields:
        fields["logit_bias"] = parse_logit_bias(fields["logit_bias"])
    try:
        SamplingParams(**fields)
    except UsageError as error:
        named = re.sub(rf"^({'|'.join(names)})\b", lambda name: f"--{name[0].replace('_', '-')}", error.message)
        raise UsageError(named, error.remedy) from error
    return fields


def parse_template_args(pairs: Iterable[str]) -> dict[str, Any]:
    """`["effort=high", "depth=3"]` as a mapping, values read as JSON where they are. Raises UsageError."""
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise UsageError(
                f"template argument {pair!r} is not NAME=VALUE", "write for example enable_thinking=false"
            )
        try:
            arguments[name] = parse_strict_json(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


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
