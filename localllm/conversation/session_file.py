"""A conversation as a file of JSON: every turn of its tree, and what it was held with. docs/cli.md has the fields.

The first line says what a list shows, so that lists need not read the rest; each turn has a line of its own. A
file may have been written by anybody: all of it is checked.
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
from localllm.files import parse_strict_json, write_atomic
from localllm.metrics import Metrics
from localllm.request import FinishReason, SamplingParams
from localllm.sampling import params_from_json, params_to_json

VERSION = 2
MAX_FILE_BYTES = 256 * 2**20  # of a file: more than anybody writes
MAX_HEADER_BYTES = 2048  # the first line has fewer
MAX_TITLE_CHARACTERS = 60  # characters of a title that is taken from a question
# Of an answer's numbers, those of its single tokens are left out, as they are by far the most.
METRIC_TYPES = {
    field.name: get_type_hints(Metrics)[field.name] for field in fields(Metrics) if field.name != "itl_s"
}


class SessionHeader(NamedTuple):
    """What a list shows of a conversation. Times are seconds since 1970."""

    title: str
    model: str
    began: float
    changed: float
    questions: int


@dataclass
class SavedSession:
    """A conversation without the model that it is held with."""

    title: str
    model: str  # the name of the one that it was last held with
    began: float  # in seconds since 1970, as is `changed`
    changed: float
    params: SamplingParams
    system: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    root: Turn = field(default_factory=lambda: Turn("", None))
    current: Turn | None = None  # None: the root

    @classmethod
    def from_chat(cls, chat: Chat, title: str, began: float, changed: float) -> "SavedSession":
        """title: "" takes it from the first question."""
        return cls(
            title or default_title(chat.root),
            chat.model.name,
            began,
            changed,
            chat.params,
            chat.system,
            chat.template_arguments,
            chat.root,
            chat.current,
        )

    def restore_into(self, chat: Chat) -> None:
        """Make it the conversation of `chat`, whose model it goes on with. Of the template's arguments those stay
        that `chat` has, as another model's template may know no others."""
        chat.params, chat.system = self.params, self.system
        chat.root, chat.current = self.root, self.current or self.root
        if self.model == chat.model.name:
            chat.template_arguments = dict(self.template_arguments)

    @property
    def header(self) -> SessionHeader:
        questions = sum(1 for _ in self.root.descendants)
        return SessionHeader(self.title, self.model, self.began, self.changed, questions)


def default_title(root: Turn) -> str:
    """The begin of the first question, in one line."""
    words = " ".join(root.children[0].question[:1000].split()) if root.children else ""
    return words if len(words) <= MAX_TITLE_CHARACTERS else words[: MAX_TITLE_CHARACTERS - 1].rstrip() + "…"


def write(path: Path, session: SavedSession) -> None:
    """Whole or not at all, for this user alone. Raises UsageError where that cannot be."""
    try:
        write_atomic(path, to_text(session))
    except (OSError, ValueError) as error:
        raise UsageError(f"the conversation cannot be saved: {error}") from error


def to_text(session: SavedSession) -> str:
    """Raises ValueError where a text has characters that no file can hold."""
    turns, places = list(session.root.descendants), {session.root: None}
    places |= {turn: place for place, turn in enumerate(turns)}
    rest = {
        "system": session.system,
        "params": params_to_json(session.params),
        "template_arguments": session.template_arguments,
        "at": places[session.current or session.root],
    }
    lines = [_to_json_line(_turn_to_json(turn, places)) for turn in turns]
    return (
        f"{_to_json_line({'version': VERSION, **session.header._asdict()})[:-1]},\n{_to_json_line(rest)[1:-1]},\n"
        + ('"turns": [\n' + ",\n".join(lines) + "\n]}\n")
    )


def _to_json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _turn_to_json(turn: Turn, indices: Mapping[Turn, int | None]) -> dict[str, Any]:
    assert turn.parent
    return {
        "parent": indices[turn.parent],
        "chosen": turn.parent.chosen_child is turn,
        "question": turn.question,
        "attached": [{"name": file.name, "text": file.text} for file in turn.attachments],
        "answer": turn.answer,
        "thoughts": turn.thoughts,
        "model": turn.model,
        "asked": turn.asked_at,
        "finish_reason": turn.finish_reason,
        "metrics": _metrics_to_json(turn.metrics) if turn.metrics else None,
    }


def _metrics_to_json(metrics: Metrics) -> dict[str, float | None]:
    values = {name: getattr(metrics, name) for name in METRIC_TYPES}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read_header(path: Path) -> SessionHeader:
    """What a list shows, by the first line alone where there is one. Raises UsageError as `read` does."""
    try:
        with path.open("rb") as file:
            line, end, _ = file.read(MAX_HEADER_BYTES).partition(b",\n")
        content = parse_strict_json(line + b"}") if end else None
        if isinstance(content, dict) and content.pop("version", None) == VERSION:
            return _header_from_json(content)
    except OSError as error:
        raise UsageError(f"the conversation cannot be read: {error}") from error
    except (ValueError, RecursionError, KeyError):
        pass  # laid out by another program
    return read(path).header


def read(path: Path) -> SavedSession:
    """Raises UsageError where the file is not there or is no conversation."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than any conversation")
        content = parse_strict_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"the conversation cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error})") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise UsageError(f"{path} is not a conversation of format {VERSION}")
    try:
        return _session_from_json(content)
    except UsageError as error:
        raise UsageError(f"{path} is a damaged conversation ({error.message})") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} is a damaged conversation ({error!r})") from error


def _session_from_json(content: Mapping[str, Any]) -> SavedSession:
    head = _header_from_json(content)
    kept = SavedSession(head.title, head.model, head.began, head.changed, params_from_json(content["params"]))
    kept.system = _optional_text(content, "system")
    kept.template_arguments = dict(_require_type(dict, content["template_arguments"]))
    turns: list[Turn] = []
    for each in _require_type(list, content["turns"]):
        # A parent stands before its children, so that nothing can go round in a circle.
        parent = _turn_by_index(each["parent"], turns, kept.root)
        turn = _turn_from_json(each, parent)
        turns.append(turn)
        parent.children.append(turn)
        if _require_type(bool, each["chosen"]):
            if parent.chosen_child:
                raise ValueError("two turns are chosen in one place")
            parent.chosen_child = turn
    if any(turn.children and not turn.chosen_child for turn in (kept.root, *turns)):
        raise ValueError("no turn is chosen in one place")
    kept.current = _turn_by_index(content["at"], turns, kept.root)
    return kept


def _header_from_json(content: Mapping[str, Any]) -> SessionHeader:
    title = " ".join(_require_text(content, "title").split())
    began, changed = (_require_seconds(content[name]) for name in ("began", "changed"))
    return SessionHeader(
        title, _require_text(content, "model"), began, changed, _require_count(content["questions"])
    )


def _turn_from_json(fields: Mapping[str, Any], parent: Turn) -> Turn:
    finish, asked = fields["finish_reason"], fields["asked"]
    return Turn(
        _require_text(fields, "question"),
        parent,
        _require_text(fields, "answer"),
        _require_text(fields, "thoughts"),
        _require_text(fields, "model"),
        None if finish is None else FinishReason(finish),
        None if fields["metrics"] is None else _metrics_from_json(_require_type(dict, fields["metrics"])),
        tuple(
            Attachment(_require_text(file, "name"), _require_text(file, "text"))
            for file in _require_type(list, fields["attached"])
        ),
        None if asked is None else _require_seconds(asked),
    )


def _turn_by_index(place: Any, turns: list[Turn], root: Turn) -> Turn:
    if place is None:
        return root
    if _require_count(place) >= len(turns):
        raise ValueError("a turn is named before it comes")
    return turns[place]


def _metrics_from_json(numbers: Mapping[str, Any]) -> Metrics:
    """A number that is not there could not be measured, or came with a later version."""
    found: dict[str, Any] = {}
    for name, kind in METRIC_TYPES.items():
        value = numbers.get(name)
        missing = 0 if kind is int else math.nan
        found[name] = (
            missing if value is None else _require_count(value) if kind is int else _require_seconds(value)
        )
    return Metrics(**found, itl_s=())


def _require_type(expected_type: type[Any], value: Any) -> Any:
    if not isinstance(value, expected_type):
        raise ValueError(f"{repr(value)[:60]} is no {expected_type.__name__}")
    return value


def _require_text(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(text := fields[name], str):
        raise ValueError(f"{name} is no text")
    return text


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields[name] is None else _require_text(fields, name)


def _require_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{repr(value)[:60]} is no count")
    return value


def _require_seconds(value: Any) -> float:
    """Of seconds: JSON has no infinity, and a year has four digits."""
    if type(value) not in (int, float) or not 0 <= value < 2e11:
        raise ValueError(f"{repr(value)[:60]} is no number of seconds")
    return float(value)
