"""The slash commands of a conversation, shared by the line editor and the app.

Each command takes its arguments and returns the next action: text to show, an answer to stream, or text to edit.
Independent of terminals. Leaving raises EOFError, like Ctrl-D.
"""

import dataclasses
import difflib
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from localllm.conversation.chat import AnswerEvents, Turn
from localllm.conversation.export import FORMATS, export_text
from localllm.conversation.session import Session
from localllm.conversation.sessions import SearchHit, SessionSummary, normalize_title
from localllm.errors import UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import format_bytes, format_columns, format_table, printable
from localllm.request import SamplingParams
from localllm.sampling import parse_logit_bias

MAX_LISTED = 20  # conversations in a list
# Log probabilities would have no visible effect in a conversation, and a grammar applies to one answer only.
PARAMETER_NAMES = [
    f.name for f in dataclasses.fields(SamplingParams) if not f.name.endswith(("logprobs", "grammar"))
]

EXCERPT_CHARACTERS = 50  # of a question in a list
OPENING_QUOTES = re.compile(r'\s*(/(?:set\s+)?system\s+)?"""')


@dataclass(frozen=True)
class CommandResult:
    """The result of a command, for its caller to act on."""

    text: str = ""  # to show
    start_answer: Callable[[], AnswerEvents] | None = None  # an answer to stream
    edit_text: str | None = None  # initial text of the next message, to be changed and sent


class Command(NamedTuple):
    """A slash command. run: takes the session and the arguments, returns the result or text to show"""

    usage: str
    help: str
    run: Callable[[Session, str], CommandResult | str]


def execute(session: Session, line: str) -> CommandResult:
    """Execute a line that begins with a slash. Raises UsageError with a remedy, EOFError to leave."""
    session.editing = None
    name, *rest = line.split(maxsplit=1)
    command = COMMANDS.get(name)
    if command is None:
        similar = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.6)
        suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise UsageError(
            f"there is no command {name}",
            f"{suggestion or '/help shows all; '}a space before the / sends it as text",
        )
    result = command.run(session, rest[0].strip() if rest else "")
    result = CommandResult(result) if isinstance(result, str) else result
    notice = session.save() if session.id and not result.start_answer else ""
    return replace(result, text=f"{result.text}\n{notice}") if notice else result


def command_help() -> list[tuple[str, str]]:
    """Return all commands with their descriptions, for completion."""
    return [(name, command.help) for name, command in COMMANDS.items()]


def strip_triple_quotes(text: str) -> str:
    """Remove the triple quotes around a text of several lines."""
    text = text.strip()
    return text[3:-3].strip("\n") if text.startswith('"""') and text.endswith('"""') and len(text) >= 6 else text


def has_open_quotes(text: str) -> bool:
    """Return whether a message, or a system prompt, begins with triple quotes that are not closed at its end."""
    opening = OPENING_QUOTES.match(text)
    return opening is not None and not text[opening.end() :].rstrip().endswith('"""')


def _help(session: Session, rest: str) -> str:
    rows = [(command.usage, command.help) for command in COMMANDS.values()]
    keys = [
        ("/set verbose, /set quiet", "measurements after each answer, or none"),
        ("/set think, /set nothink", "let the model think before it answers, or not"),
        ("/set history, /set nohistory", "save new messages, or not"),
        ("@FILE", "attach a text file; \\@ is a plain @"),
        ('"""', "begin and end a text of several lines"),
        ("Ctrl-C", "stop the answer, or clear the line"),
        ("Ctrl-D", "leave"),
    ]
    return format_columns([*dict.fromkeys(rows), *keys])


def _set(session: Session, rest: str) -> str:
    if rest.split()[:1] == ["system"]:  # Ollama's form of /system; quotes in the text belong to it
        return _system(session, rest.removeprefix("system").strip())
    try:
        name, *words = shlex.split(rest) or [""]
    except ValueError as error:
        raise UsageError(f"cannot read {rest!r} ({error})", "close the quotes") from error
    if name in ("verbose", "quiet") and not words:
        session.verbose = name == "verbose"
        return f"{name}: {'measurements' if session.verbose else 'nothing'} after each answer"
    if name in ("think", "nothink") and not words:
        switch = session.llm.template_arguments({}, think=name == "think")
        session.chat.template_arguments |= switch
        return f"{name}: the model {'thinks' if name == 'think' else 'does not think'} before it answers"
    if name in ("history", "nohistory") and not words:
        session.autosave = name == "history"
        return f"{name}: new messages are {'saved' if session.autosave else 'not saved'}"
    if name == "parameter" and len(words) >= 2:
        session.chat.params = with_parameter(session.chat.params, words[0], words[1:])
        return f"{words[0]} = {value_to_text(getattr(session.chat.params, words[0])) or '-'}"
    if name == "parameter" and not words:
        return _parameter_table(session.chat.params)
    raise UsageError(
        f"/set {rest} is unknown or incomplete" if rest else "/set needs a name",
        "/set takes parameter NAME VALUE, system TEXT, verbose or quiet, think or nothink, history or nohistory",
    )


def _parameter_table(params: SamplingParams) -> str:
    return format_columns([(name, value_to_text(getattr(params, name)) or "-") for name in PARAMETER_NAMES])


def value_to_text(value: object) -> str:
    """Return a parameter's value as the user would type it, "" for none."""
    if isinstance(value, tuple):
        return shlex.join(printable(str(word).replace("\n", "\\n").replace("\t", "\\t")) for word in value)
    if isinstance(value, Mapping):
        return " ".join(f"{token}={str(bias).removesuffix('.0')}" for token, bias in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value)


def _show(session: Session, rest: str) -> str:
    llm, chat = session.llm, session.chat
    neutral = SamplingParams()
    changed = [
        f"{name}={value_to_text(getattr(chat.params, name)) or '-'}"
        for name in PARAMETER_NAMES
        if getattr(chat.params, name) != getattr(neutral, name)
    ]
    template = str(chat.template_arguments.get("chat_template", "default")) if llm.has_chat_template else "none"
    switches = [f"{name}={value}" for name, value in chat.template_arguments.items() if name != "chat_template"]
    used = "unknown before the next answer" if chat.messages else "no messages yet"
    kv_dtype = f", KV cache in {llm.kv_dtype}" if llm.kv_dtype != llm.dtype else ""
    if chat.used_tokens is not None:
        used = f"{chat.used_tokens} tokens used"
    return format_columns(
        [
            ("model", llm.name),
            ("runs on", f"{llm.device} in {llm.dtype}, {format_bytes(llm.weight_bytes)} of weights{kv_dtype}"),
            ("context", f"{used}, {llm.context} at most"),
            ("messages", str(len(chat.messages))),
            ("parameters", " ".join(changed) or "all neutral"),
            ("system", chat.system or "-"),
            ("template", ", ".join([template, *switches])),
        ]
    )


def _system(session: Session, rest: str) -> str:
    if not rest:
        return session.chat.system or "no system prompt; /system TEXT sets one"
    session.chat.system = None if rest == "none" else strip_triple_quotes(rest)
    return "system prompt removed" if rest == "none" else "system prompt set"


def _edit(session: Session, rest: str) -> CommandResult:
    turn = _current_turn(session, "to edit")
    if not rest:
        return CommandResult(edit_text=session.edit(turn))
    session.edit(turn)
    return CommandResult(start_answer=lambda: session.ask(strip_triple_quotes(rest)))


def _regenerate(session: Session, rest: str) -> CommandResult:
    turn = _current_turn(session, "to answer again")
    return CommandResult(start_answer=lambda: session.chat.regenerate(turn))


def _undo(session: Session, rest: str) -> str:
    question = session.chat.undo()
    if question is None:
        raise UsageError("there is nothing to undo")
    return f"undone: {question.splitlines()[0] if question else ''}"


def _redo(session: Session, rest: str) -> str:
    if not session.chat.redo():
        raise UsageError("there is nothing to redo")
    return f"redone: {_excerpt(session.chat.current.question)}"


def _branch(session: Session, rest: str) -> str:
    branches = session.chat.branches
    if not branches:
        raise UsageError("there are no messages yet")
    if not rest:
        current_end = session.chat.current.branch_end
        rows = [
            (
                f"{'*' if end is current_end else ' '} {number}",
                str(end.depth),
                _excerpt(end.question),
                _excerpt(end.answer),
            )
            for number, end in enumerate(branches, 1)
        ]
        return format_table([("  BRANCH", "QUESTIONS", "LAST QUESTION", "ANSWER"), *rows])
    if not (rest.isdecimal() and 1 <= int(rest[:9]) <= len(branches)):
        raise UsageError(f"there is no branch {rest}", f"/branch lists them, 1 to {len(branches)}")
    session.chat.switch_to(branches[int(rest) - 1])
    return f"on branch {rest}, after: {_excerpt(session.chat.current.question)}"


def _clear(session: Session, rest: str) -> str:
    had_turns = bool(session.chat.root.children)
    previous_id = session.start_new()
    notice = (
        f"; the previous one is saved, /load {previous_id} continues it"
        if previous_id
        else "; the previous one is discarded"
    )
    return f"a new conversation, with this system prompt and these parameters{notice if had_turns else ''}"


def _title(session: Session, rest: str) -> str:
    if rest:
        session.title = normalize_title(rest)
    return session.snapshot.title or "no title yet: the first question will be used"


def _sessions(session: Session, rest: str) -> str:
    summaries = session.store.list()
    if not summaries:
        return "no conversation is saved yet"
    more = f"\n{len(summaries) - MAX_LISTED} more: `localllm chats`" if len(summaries) > MAX_LISTED else ""
    return f"{format_summaries(summaries[:MAX_LISTED])}{more}\n/load ID continues one"


def _search(session: Session, rest: str) -> str:
    if not rest:
        raise UsageError("/search needs words", "/search WORDS")
    hits = list(islice(session.store.search(rest), MAX_LISTED))
    return "\n".join(map(format_hit, hits)) if hits else "no conversation has all of these words"


def _save(session: Session, rest: str) -> str:
    session.save_as(rest)
    return f"saved, including future messages; /load {rest} continues it"


def _load(session: Session, rest: str) -> str:
    model_name = session.load(rest).model
    notice = f" (it used {model_name})" if model_name != session.llm.name else ""
    return f"loaded {len(session.chat.messages)} messages{notice}"


def _export(session: Session, rest: str) -> str:
    all_branches, name = rest.startswith("all "), rest.removeprefix("all ").strip()
    path = expand_path(name)
    file_format = path.suffix.removeprefix(".")
    if file_format not in FORMATS:
        raise UsageError("/export needs a Markdown or JSON file", "/export [all] FILE.md or FILE.json")
    if not session.chat.turns and not all_branches:
        raise UsageError("there are no messages yet")
    try:
        write_user_file(
            path, export_text(session.snapshot, file_format, all_branches=all_branches), overwrite=False
        )
    except FileExistsError as error:
        raise UsageError(f"{name} already exists", "use another file") from error
    return f"exported to {name}"


def _leave(session: Session, rest: str) -> str:
    raise EOFError


COMMANDS = {
    "/help": Command("/help, /?", "this list", _help),
    "/set": Command("/set parameter [NAME VALUE]", "set a sampling parameter, or list them", _set),
    "/show": Command("/show", "model, parameters, system prompt, context in use", _show),
    "/system": Command("/system [TEXT | none]", "set the system prompt, or show it", _system),
    "/edit": Command("/edit [TEXT]", "replace the last question", _edit),
    "/regenerate": Command("/regenerate", "another answer to the last question", _regenerate),
    "/undo": Command("/undo", "undo the last question and its answer", _undo),
    "/redo": Command("/redo", "redo what was undone", _redo),
    "/branch": Command("/branch [NUMBER]", "list the branches, or switch to one", _branch),
    "/clear": Command("/clear, /new", "start a new conversation", _clear),
    "/title": Command("/title [TEXT]", "set the conversation's title, or show it", _title),
    "/sessions": Command("/sessions", "list saved conversations, newest first", _sessions),
    "/search": Command("/search WORDS", "find saved conversations by their text", _search),
    "/save": Command("/save NAME", "save the conversation under a name", _save),
    "/load": Command("/load ID | NAME | last", "continue a saved conversation", _load),
    "/export": Command("/export [all] FILE.md | FILE.json", "export this branch, or all of them", _export),
    "/bye": Command("/bye, /exit", "leave", _leave),
}
COMMANDS |= {"/?": COMMANDS["/help"], "/new": COMMANDS["/clear"], "/exit": COMMANDS["/bye"]}


def format_summaries(summaries: list[SessionSummary]) -> str:
    """Format conversations as a list."""
    rows = [(summary.id, *_summary_columns(summary)) for summary in summaries]
    return format_table([("ID", "CHANGED", "QUESTIONS", "MODEL", "TITLE"), *rows])


def _summary_columns(summary: SessionSummary) -> tuple[str, ...]:
    if summary.header is None:
        return "-", "-", "-", summary.title
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.header.changed))
    return changed, str(summary.header.questions), summary.header.model, summary.title


def format_hit(hit: SearchHit) -> str:
    """Format a conversation with its match, in two lines."""
    location = f"question {hit.question}, {hit.part}" if hit.question else hit.part
    return f"{hit.summary.id}  {hit.summary.title}\n    {location}: {hit.before}{hit.match}{hit.after}"


def with_parameter(params: SamplingParams, name: str, words: list[str]) -> SamplingParams:
    """Return the parameters with one changed. words: the value, `none` resets it

    Raises UsageError with a remedy for an unknown name or an invalid value.
    """
    if name == "num_ctx":
        raise UsageError("the context is chosen at start", f"use `localllm run` with --context {words[0]}")
    if name not in PARAMETER_NAMES:
        similar = difflib.get_close_matches(name, PARAMETER_NAMES, n=2, cutoff=0.5)
        suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise UsageError(f"there is no parameter {name}", f"{suggestion}/set parameter shows all")
    if [word.lower() for word in words] == ["none"]:
        return dataclasses.replace(params, **{name: getattr(SamplingParams(), name)})
    if name in ("stop", "stop_ids", "logit_bias"):
        values = {"stop": tuple, "stop_ids": _parse_token_ids, "logit_bias": parse_logit_bias}[name](words)
        return dataclasses.replace(params, **{name: values})
    if len(words) > 1:
        raise UsageError(f"{name} takes one value", f"/set parameter {name} VALUE")
    return dataclasses.replace(params, **{name: _parse_value(words[0])})


def _parse_token_ids(words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise UsageError(f"{' '.join(words)} are not token ids", "use whole numbers") from error


def _parse_value(word: str) -> object:
    """Parse a number or boolean; anything else remains text, which SamplingParams rejects by name."""
    words = {"true": True, "on": True, "false": False, "off": False}
    if word.lower() in words:
        return words[word.lower()]
    for parse in (int, float):
        try:
            return parse(word)
        except ValueError:
            continue
    return word


def _current_turn(session: Session, purpose: str) -> Turn:
    if session.chat.current.parent is None:
        raise UsageError(f"there is no question {purpose}")
    return session.chat.current


def _excerpt(text: str) -> str:
    words = " ".join(text[: 4 * EXCERPT_CHARACTERS].split())
    return words if len(words) <= EXCERPT_CHARACTERS else words[: EXCERPT_CHARACTERS - 1] + "…"
