"""Which rates earlier answers reached on this machine, so that the next prediction is better: `runs.jsonl` in
LOCALLLM_HOME, a line an answer, the newest last.

Knows no torch and no model: what it keeps and compares are names and numbers.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from localllm.files import write_atomic

MIN_OUTPUT_TOKENS = 16  # of an answer that tells something about decoding
MIN_PROMPT_TOKENS = 64  # tokens that tell something about prefill
MAX_RUNS = 256  # runs in the file
MAX_FILE_BYTES = 1_000_000  # of the file that are read
COMPARABLE_FACTOR = 4.0  # times: models whose steps read as much as that reach about the same rates


@dataclass(frozen=True)
class Run:
    """One answer."""

    model: str
    device: str  # by the name it gives itself
    dtype: str
    form: str  # the weights' most frequent format
    threads: int
    context: int  # tokens at the end
    bytes_per_token: float  # that a step of decoding read
    tokens_per_s: float
    flops_per_s: float | None  # of prefill; None where the prompt was short

    @property
    def bandwidth(self) -> float:
        return self.bytes_per_token * self.tokens_per_s

    def is_comparable(self, other: "Run") -> bool:
        """Does one tell something about the other?"""
        setup = ("device", "dtype", "form", "threads")
        near = 1 / COMPARABLE_FACTOR <= self.bytes_per_token / other.bytes_per_token <= COMPARABLE_FACTOR
        return near and all(getattr(self, name) == getattr(other, name) for name in setup)


def record(home: Path, run: Run, note: Callable[[str], None]) -> None:
    """Appends a run, and forgets the oldest of too many. `note` is told why that cannot be done."""
    file = home / "runs.jsonl"
    kept = [*read(file, note), run][-MAX_RUNS:]
    try:
        write_atomic(file, "".join(json.dumps(asdict(each)) + "\n" for each in kept))
    except OSError as error:
        note(f"note: what was measured is not kept: {error}")


def read(file: Path, note: Callable[[str], None]) -> list[Run]:
    """The runs of a file; a line that is none is passed over with a note."""
    try:
        with file.open("rb") as stream:
            lines = stream.read(MAX_FILE_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        note(f"note: {file} cannot be read: {error}")
        return []
    runs = [run for run in map(parse, lines) if run]
    if len(runs) < len(lines):
        note(f"note: {len(lines) - len(runs)} of {len(lines)} lines of {file} are no runs, and are not used")
    return runs


def parse(line: bytes) -> Run | None:
    try:
        entry = json.loads(line)
        run = Run(**{field.name: entry[field.name] for field in fields(Run)})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    names = (run.model, run.device, run.dtype, run.form)
    numbers = (run.bytes_per_token, run.tokens_per_s, 1.0 if run.flops_per_s is None else run.flops_per_s)
    good = all(isinstance(name, str) for name in names) and all(map(is_positive, numbers))
    return run if good and type(run.threads) is int else None


def is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and number is not True and 0 < number < math.inf


@dataclass(frozen=True)
class MedianRates:
    """What several runs reached, as medians."""

    bandwidth: float  # bytes/s of decoding
    flops_per_s: float | None  # of prefill; None where no prompt was long enough to tell
    count: int

    @property
    def answers(self) -> str:
        return "one answer" if self.count == 1 else f"{self.count} answers"


def median_rates(runs: list[Run], like: Run) -> MedianRates | None:
    """Of the same model's runs in the same setup, else of those alike; None where there are none."""
    near = [run for run in runs if run.is_comparable(like)]
    near = [run for run in near if run.model == like.model] or near
    if not near:
        return None
    computed = [run.flops_per_s for run in near if run.flops_per_s]
    rate = statistics.median(computed) if computed else None
    return MedianRates(statistics.median(run.bandwidth for run in near), rate, len(near))
