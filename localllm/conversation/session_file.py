"""A conversation as a JSON file: every turn of its tree, and its model and parameters. docs/cli.md lists the
fields.

The first line contains what a list shows, so that lists need not read the rest; each turn has its own line. A file
may come from any source, so everything is validated.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from localllm.conversation.attach import Attachment
from localllm.conversation.chat import Chat, Turn
from localllm.errors import UsageError
from localllm.files import parse_strict_json, reason_of, write_atomic
from localllm.metrics import Metrics
from localllm.request import FinishReason, SamplingParams
from localllm.sampling import params_from_json, params_to_json

VERSION = 2
MAX_FILE_BYTES = 256 * 2**20  # per file: larger than any real conversation
MAX_HEADER_BYTES = 2048  # upper limit of the first line
MAX_TITLE_CHARACTERS = 60  # of a title taken from a question
# An answer's per-token measurements are omitted, as they are by far the largest part.
METRIC_TYPES = {
    field.name: get_type_hints(Metrics)[field.name] for field in fields(Metrics) if field.name != "itl_s"
}


class SessionHeader(NamedTuple):
    """Properties of a conversation for lists. Times are seconds since 1970."""

    title: str
    model: str
    began: float
    changed: float
    questions: int


@dataclass
class SavedSession:
    """A conversation without its model."""

    title: str
    model: str  # name of the last one used
    began: float  # in seconds since 1970, as is `changed`
    changed: float
    params: SamplingParams
    system: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    root: Turn = field(default_factory=lambda: Turn("", None))
    current: Turn | None = None  # None for the root

    @classmethod
    def from_chat(cls, chat: Chat, title: str, began: float, changed: float) -> "SavedSession":
        """title: "" for the first question."""
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
        """Load it into `chat`, with that chat's model. Template arguments are restored only for the same model,
        since another model's template may not support them.
        """
        chat.params, chat.system = self.params, self.system
        chat.root, chat.current = self.root, self.current or self.root
        if self.model == chat.model.name:
            chat.template_arguments = dict(self.template_arguments)

    @property
    def header(self) -> SessionHeader:
        questions = sum(1 for _ in self.root.descendants)
        return SessionHeader(self.title, self.model, self.began, self.changed, questions)


def default_title(root: Turn) -> str:
    """Return the beginning of the first question, in one line."""
    words = " ".join(root.children[0].question[:1000].split()) if root.children else ""
    return words if len(words) <= MAX_TITLE_CHARACTERS else words[: MAX_TITLE_CHARACTERS - 1].rstrip() + "…"


def write(path: Path, session: SavedSession) -> None:
    """Write atomically, private to this user. Raises UsageError if that fails."""
    try:
        write_atomic(path, to_text(session))
    except (OSError, ValueError) as error:
        raise UsageError(f"the conversation cannot be saved: {reason_of(error)}") from error


def to_text(session: SavedSession) -> str:
    """Return the contents of the file. Raises ValueError for values that JSON does not have."""
    turns, indices = list(session.root.descendants), {session.root: None}
    indices |= {turn: index for index, turn in enumerate(turns)}
    rest = {
        "system": session.system,
        "params": params_to_json(session.params),
        "template_arguments": session.template_arguments,
        "at": indices[session.current or session.root],
    }
    lines = [_to_json_line(_turn_to_json(turn, indices)) for turn in turns]
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
    """Read what a list shows, from the first line only if possible. Raises UsageError like `read`."""
    try:
        with path.open("rb") as file:
            line, end, _ = file.read(MAX_HEADER_BYTES).partition(b",\n")
        content = parse_strict_json(line + b"}") if end else None
        if isinstance(content, dict) and content.pop("version", None) == VERSION:
            return _header_from_json(content)
    except OSError as error:
        raise UsageError(f"the conversation cannot be read: {reason_of(error)}") from error
    except (ValueError, RecursionError, KeyError):
        pass  # formatted by another program
    return read(path).header


def read(path: Path) -> SavedSession:
    """Read a conversation. Raises UsageError if the file does not exist or is not a conversation."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is too large for a conversation")
        content = parse_strict_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"the conversation cannot be read: {reason_of(error)}") from error
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
    header = _header_from_json(content)
    session = SavedSession(
        header.title, header.model, header.began, header.changed, params_from_json(content["params"])
    )
    session.system = _optional_text(content, "system")
    session.template_arguments = dict(_require_type(dict, content["template_arguments"]))
    turns: list[Turn] = []
    for turn_fields in _require_type(list, content["turns"]):
        # A parent must precede its children, so that there are no cycles.
        parent = _turn_by_index(turn_fields["parent"], turns, session.root)
        turn = _turn_from_json(turn_fields, parent)
        turns.append(turn)
        parent.children.append(turn)
        if _require_type(bool, turn_fields["chosen"]):
            if parent.chosen_child:
                raise ValueError("two turns are chosen among siblings")
            parent.chosen_child = turn
    if any(turn.children and not turn.chosen_child for turn in (session.root, *turns)):
        raise ValueError("no turn is chosen among siblings")
    session.current = _turn_by_index(content["at"], turns, session.root)
    return session


def _header_from_json(content: Mapping[str, Any]) -> SessionHeader:
    title = " ".join(_require_text(content, "title").split())
    began, changed = (_require_seconds(content[name]) for name in ("began", "changed"))
    return SessionHeader(
        title, _require_text(content, "model"), began, changed, _require_count(content["questions"])
    )


def _turn_from_json(fields: Mapping[str, Any], parent: Turn) -> Turn:
    finish_reason, asked_at = fields["finish_reason"], fields["asked"]
    return Turn(
        _require_text(fields, "question"),
        parent,
        _require_text(fields, "answer"),
        _require_text(fields, "thoughts"),
        _require_text(fields, "model"),
        None if finish_reason is None else FinishReason(finish_reason),
        None if fields["metrics"] is None else _metrics_from_json(_require_type(dict, fields["metrics"])),
        tuple(
            Attachment(_require_text(file, "name"), _require_text(file, "text"))
            for file in _require_type(list, fields["attached"])
        ),
        None if asked_at is None else _require_seconds(asked_at),
    )


def _turn_by_index(index: Any, turns: list[Turn], root: Turn) -> Turn:
    if index is None:
        return root
    if _require_count(index) >= len(turns):
        raise ValueError("a turn is referenced before its definition")
    return turns[index]


def _metrics_from_json(numbers: Mapping[str, Any]) -> Metrics:
    """Parse measurements. A missing value was not measured, or was added in a later version."""
    values: dict[str, Any] = {}
    for name, metric_type in METRIC_TYPES.items():
        value, is_count = numbers.get(name), metric_type is int
        if value is None:
            values[name] = 0 if is_count else math.nan
        else:
            values[name] = _require_count(value) if is_count else _require_seconds(value)
    return Metrics(**values, itl_s=())


def _require_type(expected_type: type[Any], value: Any) -> Any:
    if not isinstance(value, expected_type):
        raise ValueError(f"{repr(value)[:60]} is not of type {expected_type.__name__}")
    return value


def _require_text(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(text := fields[name], str):
        raise ValueError(f"{name} is not a string")
    return text


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields[name] is None else _require_text(fields, name)


def _require_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{repr(value)[:60]} is not a count")
    return value


def _require_seconds(value: Any) -> float:
    """Validate seconds: JSON has no infinity, and years have four digits."""
    if type(value) not in (int, float) or not 0 <= value < 2e11:
        raise ValueError(f"{repr(value)[:60]} is not a number of seconds")
    return float(value)
