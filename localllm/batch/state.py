"""Records what the lines of an output depend on in `OUT.state`, so that a run can resume or refuse to.

Independent of the lines.
"""

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
    """What was requested: the input's digest, the model's name, seed, limits, options."""

    ran: Mapping[str, Any] = field(default_factory=dict)
    """What was used: device, number formats, context, the model's files."""

    format: int = STATE_FORMAT


def state_path(out: Path) -> Path:
    return out.with_name(out.name + ".state")


def read_state(out: Path) -> JobState | None:
    """Return None if there is none. Raises UsageError if it cannot be parsed."""
    file = state_path(out)
    try:
        fields = read_json(file)
        if not fields:
            return None
        state = JobState(**fields)
        if state.format != STATE_FORMAT or not isinstance(state.asked, dict) or not isinstance(state.ran, dict):
            raise TypeError
    except (DamagedModel, TypeError):
        raise _another(out, f"{file} was not written by this version of localllm") from None
    return state


def write_state(out: Path, state: JobState) -> None:
    with explain_disk_errors(out.parent, "use a file that can"):
        write_atomic(state_path(out), json.dumps(asdict(state), indent=1) + "\n")


def check_unchanged(out: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError for the first difference."""
    for name in sorted(kept.keys() | now.keys()):
        old, new = kept.get(name), now.get(name)
        if old != new:
            raise _another(out, f"{out} was started with another {name} ({_shown(old)}, now {_shown(new)})")


def check_output_empty(out: Path, size: int) -> None:
    """Raises UsageError if a file has contents of an unknown run."""
    if size:
        raise _another(out, f"{out} already exists, but there is no {state_path(out).name} of a batch to resume")


def _another(out: Path, why: str) -> UsageError:
    return UsageError(why, f"use another file, or remove {out} and {state_path(out).name} to start again")


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 16 else text[:12] + "…"
