"""The durations of steps on this machine by their shape, from which `simulate` predicts: `steps.jsonl` in
LOCALLLM_HOME, with one line per model and setup, the newest last.

Numbers and names of models, no text. No torch: like `runs.py`.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from localllm.files import write_atomic
from localllm.plan.runs import read_entries

FILE = "steps.jsonl"
MAX_STEPS = 4096  # of a setup: the newest
MAX_WAITS = 512
MAX_SETUPS = 16
MAX_FILE_BYTES = 16_000_000  # that are read
SHAPE_NUMBERS = 7  # of a `StepShape`
write_lock = Lock()  # so that two models of this process do not overwrite each other's steps

StepTime = tuple[float, ...]  # the numbers of a StepShape, and seconds


@dataclass(frozen=True)
class StepSetup:
    """The properties, besides their shapes, that the durations of steps depend on."""

    model: str
    device: str  # as reported by the device
    dtype: str
    kv_dtype: str
    threads: int


class Records(NamedTuple):
    """Measurements with one setup."""

    steps: list[StepTime]
    entry_waits: list[float]  # seconds from arrivals until a busy engine has received them, less half a step


def record(
    home: Path,
    setup: StepSetup,
    steps: Iterable[StepTime],
    note: Callable[[str], None],
    entry_waits: Iterable[float] = (),
) -> None:
    """Add steps to those of a setup, and waits, dropping the oldest. note: receives the reason if that fails"""
    with write_lock:
        add(home / FILE, setup, Records(list(steps), list(entry_waits)), note)


def add(file: Path, setup: StepSetup, new: Records, note: Callable[[str], None]) -> None:
    setups = read_records(file, note)
    old = setups.pop(setup, Records([], []))
    setups[setup] = Records(
        [*old.steps, *new.steps][-MAX_STEPS:], [*old.entry_waits, *new.entry_waits][-MAX_WAITS:]
    )
    lines = [
        json.dumps(
            {
                **asdict(each),
                "steps": [[*row[:-1], round(row[-1], 7)] for row in records.steps],
                "entry_waits": [round(wait, 7) for wait in records.entry_waits],
            }
        )
        for each, records in list(setups.items())[-MAX_SETUPS:]
    ]
    try:
        write_atomic(file, "".join(line + "\n" for line in lines))
    except OSError as error:
        note(f"note: the durations of steps could not be saved: {error}")


def read(file: Path, note: Callable[[str], None]) -> dict[StepSetup, list[StepTime]]:
    """Return the steps of each setup, skipping invalid lines with a note."""
    return {setup: records.steps for setup, records in read_records(file, note).items()}


def read_records(file: Path, note: Callable[[str], None]) -> dict[StepSetup, Records]:
    """Return what was measured with each setup, skipping invalid lines with a note."""
    return dict(read_entries(file, MAX_FILE_BYTES, parse, note))


def parse(line: bytes) -> tuple[StepSetup, Records] | None:
    try:
        entry = json.loads(line)
        setup = StepSetup(**{field.name: entry[field.name] for field in fields(StepSetup)})
        steps = [tuple(step) for step in entry["steps"]]
        waits = list(entry.get("entry_waits", ()))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    names = (setup.model, setup.device, setup.dtype, setup.kv_dtype)
    if not all(isinstance(name, str) for name in names) or type(setup.threads) is not int:
        return None
    is_valid = all(map(is_step, steps)) and all(isinstance(wait, float) and math.isfinite(wait) for wait in waits)
    return (setup, Records(steps, waits)) if is_valid else None


def is_step(step: tuple[Any, ...]) -> bool:
    counts, seconds = step[:-1], step[-1] if step else None
    valid_counts = len(counts) == SHAPE_NUMBERS and all(type(count) is int and count >= 0 for count in counts)
    return valid_counts and isinstance(seconds, float) and 0 < seconds < math.inf
