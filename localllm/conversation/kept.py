"""A conversation as a file of JSON: every turn of its tree, and what it was held with. docs/cli.md has the fields.

The first line says what a list shows, so that lists need not read the rest; each turn has a line of its own. Files
of version 1 held one branch, and are still read. A file may have been written by anybody: all of it is checked.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from localllm.conversation.attach import Attachment
from localllm.conversation.chat import Chat
from localllm.conversation.turn import Turn
from localllm.errors import UsageError
from localllm.files import strict_json, write_whole
from localllm.metrics import Metrics
from localllm.params import params_from_json, params_to_json
from localllm.request import FinishReason, SamplingParams

VERSION = 2
BYTES_LIMIT = 256 * 2**20  # of a file: more than anybody writes
HEAD_BYTES = 2048  # the first line has fewer
TITLE_LENGTH = 60  # characters of a title that is taken from a question
# Of an answer's numbers, those of its single tokens are left out, as they are by far the most.
NUMBERS = {field.name: get_type_hints(Metrics)[field.name] for field in fields(Metrics) if field.name != "itl_s"}


class Head(NamedTuple):
    """What a list shows of a conversation. Times are seconds since 1970."""

    title: str
    model: str
    began: float
    changed: float
    questions: int


@dataclass
class Kept:
    """A conversation without the model that it is held with."""

    title: str
    model: str  # the name of the one that it was last held with
    began: float  # in seconds since 1970, as is `changed`
    changed: float
    params: SamplingParams
    system: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    root: Turn = field(default_factory=lambda: Turn("", None))
    at: Turn | None = None  # None: the root

    @classmethod
    def of(cls, chat: Chat, title: str, began: float, changed: float) -> "Kept":
        """title: "" takes it from the first question."""
        return cls(
            title or titled(chat.root),
            chat.model.name,
            began,
            changed,
            chat.params,
            chat.system,
            chat.template_arguments,
            chat.root,
            chat.at,
        )

    def go_on(self, chat: Chat) -> None:
        """Make it the conversation of `chat`, whose model it goes on with. Of the template's arguments those stay
        that `chat` has, as another model's template may know no others."""
        chat.params, chat.system = self.params, self.system
        chat.root, chat.at = self.root, self.at or self.root
        if self.model == chat.model.name:
            chat.template_arguments = dict(self.template_arguments)

    @property
    def head(self) -> Head:
        questions = sum(1 for _ in self.root.descendants)
        return Head(self.title, self.model, self.began, self.changed, questions)


def titled(root: Turn) -> str:
    """The begin of the first question, in one line."""
    words = " ".join(root.children[0].question[:1000].split()) if root.children else ""
    return words if len(words) <= TITLE_LENGTH else words[: TITLE_LENGTH - 1].rstrip() + "…"


def write(path: Path, kept: Kept) -> None:
    """Whole or not at all, for this user alone. Raises UsageError where that cannot be."""
    try:
        write_whole(path, text_of(kept))
    except (OSError, ValueError) as error:
        raise UsageError(f"the conversation cannot be saved: {error}") from error


def text_of(kept: Kept) -> str:
    """Raises ValueError where a text has characters that no file can hold."""
    turns, places = list(kept.root.descendants), {kept.root: None}
    places |= {turn: place for place, turn in enumerate(turns)}
    rest = {
        "system": kept.system,
        "params": params_to_json(kept.params),
        "template_arguments": kept.template_arguments,
        "at": places[kept.at or kept.root],
    }
    lines = [_line(_turn_to_json(turn, places)) for turn in turns]
    return f"{_line({'version': VERSION, **kept.head._asdict()})[:-1]},\n{_line(rest)[1:-1]},\n" + (
        '"turns": [\n' + ",\n".join(lines) + "\n]}\n"
    )


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _turn_to_json(turn: Turn, places: Mapping[Turn, int | None]) -> dict[str, Any]:
    assert turn.parent
    return {
        "parent": places[turn.parent],
        "chosen": turn.parent.chosen is turn,
        "question": turn.question,
        "attached": [{"name": file.name, "text": file.text} for file in turn.attached],
        "answer": turn.answer,
        "thoughts": turn.thoughts,
        "model": turn.model,
        "asked": turn.asked,
        "finish_reason": turn.finish_reason,
        "metrics": _numbers(turn.metrics) if turn.metrics else None,
    }


def _numbers(metrics: Metrics) -> dict[str, float | None]:
    values = {name: getattr(metrics, name) for name in NUMBERS}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read_head(path: Path) -> Head:
    """What a list shows, by the first line alone where there is one. Raises UsageError as `read` does."""
    try:
        with path.open("rb") as file:
            line, end, _ = file.read(HEAD_BYTES).partition(b",\n")
        content = strict_json(line + b"}") if end else None
        if isinstance(content, dict) and content.pop("version", None) == VERSION:
            return _head(content)
    except OSError as error:
        raise UsageError(f"the conversation cannot be read: {error}") from error
    except (ValueError, RecursionError, KeyError):
        pass  # laid out by another program
    return read(path).head


def read(path: Path) -> Kept:
    """Raises UsageError where the file is not there or is no conversation."""
    try:
        if path.stat().st_size > BYTES_LIMIT:
            raise UsageError(f"{path} is larger than any conversation")
        content, changed = strict_json(path.read_bytes()), path.stat().st_mtime
    except OSError as error:
        raise UsageError(f"the conversation cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error})") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version not in (1, VERSION) or isinstance(version, bool):
        raise UsageError(f"{path} is no conversation of format 1 or {VERSION}")
    try:
        return _first_version(content, changed) if version == 1 else _second_version(content)
    except UsageError as error:
        raise UsageError(f"{path} is a damaged conversation ({error.message})") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} is a damaged conversation ({error!r})") from error


def _second_version(content: Mapping[str, Any]) -> Kept:
    head = _head(content)
    kept = Kept(head.title, head.model, head.began, head.changed, params_from_json(content["params"]))
    kept.system = _optional_text(content, "system")
    kept.template_arguments = dict(_of(dict, content["template_arguments"]))
    turns: list[Turn] = []
    for each in _of(list, content["turns"]):
        # A parent stands before its children, so that nothing can go round in a circle.
        parent = _turn_at(each["parent"], turns, kept.root)
        turn = _turn(each, parent)
        turns.append(turn)
        parent.children.append(turn)
        if _of(bool, each["chosen"]):
            if parent.chosen:
                raise ValueError("two turns are chosen in one place")
            parent.chosen = turn
    if any(turn.children and not turn.chosen for turn in (kept.root, *turns)):
        raise ValueError("no turn is chosen in one place")
    kept.at = _turn_at(content["at"], turns, kept.root)
    return kept


def _first_version(content: Mapping[str, Any], changed: float) -> Kept:
    model = _text(content, "model")
    kept = Kept(
        "", model, changed, changed, params_from_json(content["params"]), _optional_text(content, "system")
    )
    messages = _of(list, content["messages"])
    if [message["role"] for message in messages] != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError("question and answer do not take turns")
    at = kept.root
    for question, answer in zip(messages[::2], messages[1::2], strict=True):
        thoughts = _text(answer, "reasoning_content") if "reasoning_content" in answer else ""
        turn = Turn(_text(question, "content"), at, _text(answer, "content"), thoughts, model, FinishReason.STOP)
        at.children.append(turn)
        at.chosen = at = turn
    kept.title, kept.at = titled(kept.root), at
    return kept


def _head(content: Mapping[str, Any]) -> Head:
    title = " ".join(_text(content, "title").split())
    began, changed = (_number(content[name]) for name in ("began", "changed"))
    return Head(title, _text(content, "model"), began, changed, _count(content["questions"]))


def _turn(fields: Mapping[str, Any], parent: Turn) -> Turn:
    finish, asked = fields["finish_reason"], fields["asked"]
    return Turn(
        _text(fields, "question"),
        parent,
        _text(fields, "answer"),
        _text(fields, "thoughts"),
        _text(fields, "model"),
        None if finish is None else FinishReason(finish),
        None if fields["metrics"] is None else _metrics(_of(dict, fields["metrics"])),
        tuple(Attachment(_text(file, "name"), _text(file, "text")) for file in _of(list, fields["attached"])),
        None if asked is None else _number(asked),
    )


def _turn_at(place: Any, turns: list[Turn], root: Turn) -> Turn:
    if place is None:
        return root
    if _count(place) >= len(turns):
        raise ValueError("a turn is named before it comes")
    return turns[place]


def _metrics(numbers: Mapping[str, Any]) -> Metrics:
    """A number that is not there could not be measured, or came with a later version."""
    found: dict[str, Any] = {}
    for name, kind in NUMBERS.items():
        value = numbers.get(name)
        missing = 0 if kind is int else math.nan
        found[name] = missing if value is None else _count(value) if kind is int else _number(value)
    return Metrics(**found, itl_s=())


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{repr(value)[:60]} is no {kind.__name__}")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(text := fields[name], str):
        raise ValueError(f"{name} is no text")
    return text


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields[name] is None else _text(fields, name)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{repr(value)[:60]} is no count")
    return value


def _number(value: Any) -> float:
    """Of seconds: JSON has no infinity, and a year has four digits."""
    if type(value) not in (int, float) or not 0 <= value < 2e11:
        raise ValueError(f"{repr(value)[:60]} is no number of seconds")
    return float(value)
