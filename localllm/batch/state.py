"""What the lines of an output depend on, kept beside it as `OUT.state`, so that a run goes on with what it can and
refuses what it cannot. Knows nothing of lines."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm.errors import DamagedModel, UsageError
from localllm.files import explain_disk_errors, read_json, write_atomic

STATE_FORMAT = 1


@dataclass(frozen=True)
class JobState:
    asked: Mapping[str, Any]
    """What was asked for: the input's digest, the model's name, seed, limits, flags."""

    ran: Mapping[str, Any] = field(default_factory=dict)
    """What the machine made of it: device, number formats, context, the model's files."""

    format: int = STATE_FORMAT


def state_path(out: Path) -> Path:
    return out.with_name(out.name + ".state")


def read_state(out: Path) -> JobState | None:
    """None where there is none. Raises UsageError where it cannot be understood."""
    file = state_path(out)
    try:
        fields = read_json(file)
        if not fields:
            return None
        state = JobState(**fields)
        if state.format != STATE_FORMAT or not isinstance(state.asked, dict) or not isinstance(state.ran, dict):
            raise TypeError
    except (DamagedModel, TypeError):
        raise _another(out, f"{file} is not of this version of localllm") from None
    return state


def write_state(out: Path, state: JobState) -> None:
    with explain_disk_errors(out.parent, "name a file that can"):
        write_atomic(state_path(out), json.dumps(asdict(state), indent=1) + "\n")


def check_unchanged(out: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError for the first thing that differs."""
    for name in sorted(kept.keys() | now.keys()):
        before, after = kept.get(name), now.get(name)
        if before != after:
            raise _another(out, f"{out} was begun with another {name} ({_shown(before)}, now {_shown(after)})")


def check_output_empty(out: Path, size: int) -> None:
    """Raises UsageError where a file has contents and nothing says of which run."""
    if size:
        raise _another(
            out, f"{out} is there already, and no {state_path(out).name} says that a batch has begun it"
        )


def _another(out: Path, why: str) -> UsageError:
    return UsageError(why, f"name another file, or remove {out} and {state_path(out).name} to begin anew")


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 16 else text[:12] + "…"
