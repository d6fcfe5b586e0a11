"""The slash commands of a conversation. Each takes its words and gives the text to show.

Knows nothing of terminals. Leaving is EOFError, as Ctrl-D is.
"""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from localllm.cli.flags import parse_logit_bias
from localllm.cli.report import columns
from localllm.conversation.chat import Chat
from localllm.errors import UsageError
from localllm.model import Model
from localllm.request import SamplingParams
from localllm.units import size

CHAT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A conversation shows text alone, so asking for log probabilities would change nothing that can be seen; and a
# grammar is for one answer.
PARAMETERS = [f.name for f in dataclasses.fields(SamplingParams) if not f.name.endswith(("logprobs", "grammar"))]


@dataclasses.dataclass
class Session:
    """A conversation as a person holds it: with a place for saved ones, and a wish for numbers or none."""

    llm: Model
    chat: Chat
    chats: Path  # folder of saved conversations
    verbose: bool = False


class Command(NamedTuple):
    usage: str
    help: str
    act: Callable[[Session, str], str]


def execute(session: Session, line: str) -> str:
    """Do what a line that begins with a slash says. Raises UsageError with a remedy, EOFError to leave."""
    name, *rest = line.split(maxsplit=1)
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"there is no command {name}",
            f"{guess or '/help shows all; '}a space before the / sends it as text",
        )
    return command.act(session, rest[0].strip() if rest else "")


def unquote(text: str) -> str:
    """Without the triple quotes that let a text run over several lines."""
    text = text.strip()
    return text[3:-3].strip("\n") if text.startswith('"""') and text.endswith('"""') and len(text) >= 6 else text


def _help(session: Session, rest: str) -> str:
    rows = [(command.usage, command.help) for command in COMMANDS.values()]
    keys = [
        ("/set verbose, /set quiet", "measurements after each answer, or none"),
        ("/set think, /set nothink", "let the model think before it answers, or not"),
        ('"""', "begin and end a text of several lines"),
        ("Ctrl-C", "stop the answer, or clear the line"),
        ("Ctrl-D", "leave"),
    ]
    return columns([*dict.fromkeys(rows), *keys])


def _set(session: Session, rest: str) -> str:
    try:
        what, *words = shlex.split(rest) or [""]
    except ValueError as error:
        raise UsageError(f"cannot read {rest!r} ({error})", "close the quotes") from error
    if what in ("verbose", "quiet") and not words:
        session.verbose = what == "verbose"
        return f"{what}: {'measurements' if session.verbose else 'nothing'} after each answer"
    if what in ("think", "nothink") and not words:
        switch = session.llm.template_arguments({}, think=what == "think")
        session.chat.template_arguments |= switch
        return f"{what}: the model {'thinks' if what == 'think' else 'does not think'} before it answers"
    if what == "parameter" and len(words) >= 2:
        session.chat.params = _with_parameter(session.chat.params, words[0], words[1:])
        return f"{words[0]} = {getattr(session.chat.params, words[0])}"
    if what == "parameter" and not words:
        return _parameters(session.chat.params)
    raise UsageError(
        f"/set {rest} is not known or not complete" if rest else "/set needs to know what",
        "/set parameter NAME VALUE, /set verbose, /set quiet, /set think or /set nothink",
    )


def _with_parameter(params: SamplingParams, name: str, words: list[str]) -> SamplingParams:
    if name not in PARAMETERS:
        near = difflib.get_close_matches(name, PARAMETERS, n=2, cutoff=0.5)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"there is no parameter {name}", f"{guess}/set parameter shows all")
    if [word.lower() for word in words] == ["none"]:
        return dataclasses.replace(params, **{name: getattr(SamplingParams(), name)})
    if name in ("stop", "stop_ids", "logit_bias"):
        values = {"stop": tuple, "stop_ids": _whole_numbers, "logit_bias": parse_logit_bias}[name](words)
        return dataclasses.replace(params, **{name: values})
    if len(words) > 1:
        raise UsageError(f"{name} takes one value", f"/set parameter {name} VALUE")
    return dataclasses.replace(params, **{name: _value(words[0])})


def _whole_numbers(words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise UsageError(f"{' '.join(words)} are not token ids", "give whole numbers") from error


def _value(word: str) -> object:
    """A number or a truth value; anything else stays text, which SamplingParams refuses by name."""
    words = {"true": True, "false": False}
    if word.lower() in words:
        return words[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _parameters(params: SamplingParams) -> str:
    return columns([(name, str(getattr(params, name))) for name in PARAMETERS])


def _show(session: Session, rest: str) -> str:
    llm, chat = session.llm, session.chat
    neutral = SamplingParams()
    set_to = [
        f"{name}={getattr(chat.params, name)}"
        for name in PARAMETERS
        if getattr(chat.params, name) != getattr(neutral, name)
    ]
    used = "not known before the next answer" if chat.messages else "nothing said yet"
    kept = f", keys and values in {llm.kv_dtype}" if llm.kv_dtype != llm.dtype else ""
    if chat.used_tokens is not None:
        used = f"{chat.used_tokens} tokens used"
    return columns(
        [
            ("model", llm.name),
            ("runs on", f"{llm.device} in {llm.dtype}, {size(llm.weight_bytes)} of weights{kept}"),
            ("context", f"{used}, {llm.context} at most"),
            ("messages", str(len(chat.messages))),
            ("parameters", " ".join(set_to) or "all at their neutral values"),
            ("system", chat.system or "-"),
            ("template", " ".join(f"{name}={value}" for name, value in chat.template_arguments.items()) or "-"),
        ]
    )


def _clear(session: Session, rest: str) -> str:
    session.chat.clear()
    return "the conversation is forgotten; system prompt and parameters stay"


def _undo(session: Session, rest: str) -> str:
    question = session.chat.undo()
    if question is None:
        raise UsageError("there is nothing to take back")
    return f"taken back: {question.splitlines()[0] if question else ''}"


def _system(session: Session, rest: str) -> str:
    if not rest:
        return session.chat.system or "no system prompt; /system TEXT sets one"
    session.chat.system = None if rest == "none" else unquote(rest)
    return "system prompt removed" if rest == "none" else "system prompt set"


def _save(session: Session, rest: str) -> str:
    session.chat.save(_file(session, rest))
    return f"saved; /load {rest} brings it back"


def _load(session: Session, rest: str) -> str:
    file = _file(session, rest)
    if not file.exists():
        saved = sorted(path.stem for path in session.chats.glob("*.json"))
        raise UsageError(
            f"no conversation is saved as {rest}",
            f"saved are: {', '.join(saved)}" if saved else "save one with /save NAME",
        )
    held_with = session.chat.load(file)
    other = f" (it was held with {held_with})" if held_with != session.llm.name else ""
    return f"loaded {len(session.chat.messages)} messages{other}"


def _file(session: Session, name: str) -> Path:
    if not CHAT_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a conversation", "use letters, digits, dots and dashes")
    return session.chats / f"{name}.json"


def _leave(session: Session, rest: str) -> str:
    raise EOFError


COMMANDS = {
    "/help": Command("/help, /?", "this list", _help),
    "/set": Command("/set parameter [NAME VALUE]", "how to draw the next token", _set),
    "/show": Command("/show", "model, parameters, system prompt, context in use", _show),
    "/system": Command("/system [TEXT | none]", "say how the model should behave", _system),
    "/undo": Command("/undo", "take back the last question and its answer", _undo),
    "/clear": Command("/clear", "forget the conversation", _clear),
    "/save": Command("/save NAME", "keep the conversation", _save),
    "/load": Command("/load NAME", "go on with a kept one", _load),
    "/bye": Command("/bye, /exit", "leave", _leave),
}
COMMANDS |= {"/?": COMMANDS["/help"], "/exit": COMMANDS["/bye"]}
