"""Execute `localllm run`: answer one prompt, or start a conversation in the app or line by line.

Imports neither Typer nor what only loading needs, because a running server may answer within milliseconds.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from localllm.cli import io
from localllm.cli.answer import AnswerOptions, print_answer, text_or_messages
from localllm.cli.exits import die_by_signal
from localllm.cli.machine import LocalMachine, connect_or_load
from localllm.conversation.chat import Chat
from localllm.conversation.model import Model
from localllm.conversation.session import Session
from localllm.errors import LocalLLMError, UsageError
from localllm.files import parse_strict_json
from localllm.request import ChatRequest, Grammar, GrammarKind, SamplingParams
from localllm.sampling import parse_logit_bias
from localllm.settings import Settings

NO_MODEL_REMEDY = "name one: `localllm list --all` lists them, and `localllm run demo` needs no download"
GRAMMAR_FIELDS = ("schema", "json_object", "regex", "grammar", "choice")
SINGLE_ANSWER_FIELDS = (
    *GRAMMAR_FIELDS,
    "raw",
    "tools",
    "as_json",
    "receipt",
    "fail_on_length",
    "draft",
    "logprobs",
    "prompt_logprobs",
)
LEAVE_ONE_OUT = "leave one of them out"


def execute_run(flags: Mapping[str, Any]) -> None:
    """flags: by the names of the parameters of `run`, None or False if not given. Raises LocalLLMError."""
    converses = not flags["prompt"] and io.is_interactive()
    if flags["model"] is None and (flags["plain"] or not converses):  # the app has a screen to choose one
        raise UsageError("no model is named", NO_MODEL_REMEDY)
    sampling = parse_sampling_fields({**flags, "grammar": parse_grammar_flags(flags)})
    template_arguments = parse_template_args(flags["template_arg"] or [])
    _check_combinations(flags, template_arguments)
    if converses:
        _start_conversation(flags, sampling, template_arguments)
    else:
        _answer_prompt(flags, sampling, template_arguments)


def _check_combinations(flags: Mapping[str, Any], template_arguments: Mapping[str, Any]) -> None:
    """Raises UsageError for flags that exclude each other."""
    if flags["raw"] and flags["system"]:
        raise UsageError("--raw sends no system prompt", "leave out --raw or --system")
    if flags["raw"] and (template_arguments or flags["tools"] or flags["think"] is not None):
        raise UsageError("--raw uses no chat template", "leave out --raw, or --think, --tools and --template-arg")
    if flags["draft_model"] and flags["draft"] is False:
        raise UsageError("--no-draft turns off drafting, which --draft-model requires", LEAVE_ONE_OUT)


def _answer_prompt(
    flags: Mapping[str, Any], sampling: Mapping[str, Any], template_arguments: dict[str, Any]
) -> None:
    """Answer one prompt. sampling: fields of SamplingParams; template_arguments: variables of the chat
    template."""
    if flags["plain"]:
        raise UsageError("--plain is for conversations, and there is a prompt", LEAVE_ONE_OUT)
    if flags["resume"]:
        raise UsageError("--resume is for conversations, and there is a prompt", LEAVE_ONE_OUT)
    if (flags["logprobs"], flags["prompt_logprobs"]) != (None, None) and not flags["as_json"]:
        raise UsageError("log probabilities are part of the JSON output", "add --json")
    raw, system = flags["raw"], flags["system"]
    tools = io.read_tools(flags["tools"]) if flags["tools"] else None
    text = io.read_prompt(flags["prompt"] or [], raw=raw, command="run")
    out = io.StdoutWriter()
    options = AnswerOptions(
        raw=raw,
        as_json=flags["as_json"],
        verbose=flags["verbose"],
        fail_on_length=flags["fail_on_length"],
        receipt=io.receipt_path(flags["receipt"]) if flags["receipt"] else None,
        draft=bool(flags["draft"]),
    )
    with closing(connect_or_load(flags, sampling.get("grammar"))) as llm:
        arguments = llm.template_arguments(template_arguments, think=flags["think"], with_tools=tools is not None)
        prompt = text_or_messages(llm, text, system, raw=raw, with_tools=tools is not None)
        params = dataclasses.replace(llm.default_params, **sampling)
        print_answer(llm, ChatRequest(prompt, params, tools, arguments), options, out)


def _start_conversation(
    flags: Mapping[str, Any], sampling: Mapping[str, Any], template_arguments: dict[str, Any]
) -> None:
    """Hold a conversation in the app, or line by line with --plain."""
    for field in SINGLE_ANSWER_FIELDS:
        if flags[field] is not None and flags[field] is not False:
            raise UsageError(f"{io.flag_name(field)} needs a prompt", "add a prompt, or leave the flag out")

    def open_conversation(llm: Model) -> Session:
        arguments = llm.template_arguments(template_arguments, think=flags["think"])
        return open_session(llm, flags, sampling, arguments)

    if not flags["plain"]:
        run_app(flags, open_conversation)
        return
    from localllm.cli.repl import run_repl

    with closing(connect_or_load(flags, keep_conversations=True)) as llm:
        run_repl(open_conversation(llm))


def open_session(
    llm: Model, flags: Mapping[str, Any], sampling: Mapping[str, Any], template_arguments: Mapping[str, Any]
) -> Session:
    """A new conversation, or the saved one that --resume names, whose parameters are overridden by flags. Raises
    UsageError if there is no such conversation."""
    params = dataclasses.replace(llm.default_params, **sampling)
    chat = Chat(llm, params, flags["system"], template_arguments)
    session = Session(llm, chat, Settings.from_environment().home / "chats", flags["verbose"])
    if flags["resume"]:
        session.load(flags["resume"])
        chat.params = dataclasses.replace(chat.params, **sampling)
        chat.template_arguments |= template_arguments
        chat.system = flags["system"] or chat.system
    return session


def run_app(flags: Mapping[str, Any], open_conversation: Callable[[Model], Session]) -> None:
    """Run the full-screen app until the user leaves. flags: those of `run`.

    Raises UsageError if the terminal cannot show it, and the error that kept a model from loading. A signal ends
    the process after the terminal is restored.
    """
    check_terminal()
    io.clear_start_line()
    from localllm.tui.app import ChatApp  # takes 0.2 s to import

    app = ChatApp(LocalMachine(flags), flags["model"], open_conversation, Settings.from_environment().home)
    app.run()
    if app.exit_signal:
        die_by_signal(app.exit_signal)
    if app.error:
        raise app.error
    if app.return_code:
        raise LocalLLMError("the app ended unexpectedly", "the message above says where")


MIN_COLUMNS, MIN_LINES = 40, 12  # of the app's window
PLAIN_REMEDY = "add --plain to chat line by line"


def check_terminal() -> None:
    """Raises UsageError for a terminal that cannot show the app."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        raise UsageError("this terminal (TERM=dumb) cannot show the app", PLAIN_REMEDY)
    if not io.is_terminal(sys.stderr):
        raise UsageError(
            "the app is drawn on stderr, which is redirected", f"do not redirect it, or {PLAIN_REMEDY}"
        )
    columns, lines = shutil.get_terminal_size()
    if columns < MIN_COLUMNS or lines < MIN_LINES:
        message = f"the app needs {MIN_COLUMNS}x{MIN_LINES} cells and the window has {columns}x{lines}"
        raise UsageError(message, f"enlarge the window, or {PLAIN_REMEDY}")


_LARK_START = re.compile(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:))", re.MULTILINE)
_GBNF_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)


def parse_grammar_flags(flags: Mapping[str, Any]) -> Grammar | None:
    """Grammar of the flags for constrained output, or None. Raises UsageError if there are two, if a file cannot
    be read, and as `Grammar`."""
    fields = [field for field in GRAMMAR_FIELDS if flags[field] not in (None, False)]
    if len(fields) > 1:
        names = " and ".join(map(io.flag_name, fields))
        raise UsageError(f"{names} cannot be combined", LEAVE_ONE_OUT)
    match fields:
        case []:
            return None
        case ["schema"]:
            return Grammar(GrammarKind.JSON_SCHEMA, io.read_text(flags["schema"]))
        case ["json_object"]:
            return Grammar(GrammarKind.JSON)
        case ["regex"]:
            return Grammar(GrammarKind.REGEX, flags["regex"])
        case ["grammar"]:
            return _parse_grammar_file(flags["grammar"])
        case _:
            return Grammar(GrammarKind.CHOICE, _choices_json(flags["choice"]))


def _parse_grammar_file(file: str) -> Grammar:
    """Lark has a rule `start:`, GBNF a rule `root ::=`."""
    text = io.read_text(file)
    if _GBNF_ROOT.search(text):
        return Grammar(GrammarKind.GBNF, text)
    if _LARK_START.search(text):
        return Grammar(GrammarKind.LARK, text)
    raise UsageError(
        f"{io.display_name(file)} is neither a Lark nor a GBNF grammar", "add a rule `start:` or `root ::=`"
    )


def _choices_json(text: str) -> str:
    """`a,b,c` as a JSON array; a JSON array, which allows commas in choices, is returned as it is."""
    return text if text.lstrip().startswith("[") else json.dumps([part.strip() for part in text.split(",")])


def parse_sampling_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams that are set by flags. Raises UsageError for a wrong value, before a model is
    loaded."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    # Names with an underscore anywhere in a message, others, such as "stop", only as its subject.
    named = re.compile(rf"^(?:{'|'.join(names)})\b|\b(?:{'|'.join(name for name in names if '_' in name)})\b")
    fields = {name: flags[name] for name in names if flags.get(name) not in (None, [], ())}
    try:
        if "logit_bias" in fields:
            fields["logit_bias"] = parse_logit_bias(fields["logit_bias"])
        SamplingParams(**fields)
    except UsageError as error:
        message = named.sub(lambda match: io.flag_name(match[0]), error.message)
        raise UsageError(message.replace("logit bias", "--logit-bias"), error.remedy) from error
    return fields


def parse_template_args(pairs: Iterable[str]) -> dict[str, Any]:
    """`["effort=high", "depth=3"]` as a dictionary, with values that are JSON parsed. Raises UsageError."""
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise UsageError(
                f"--template-arg {pair!r} is not NAME=VALUE", "write for example enable_thinking=false"
            )
        try:
            arguments[name] = parse_strict_json(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments
