"""The rates of earlier answers on this machine, to improve predictions: `runs.jsonl` in LOCALLLM_HOME, with one
line per answer, the newest last.

No torch and no models: it stores and compares names and numbers.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from localllm.files import write_atomic

MIN_OUTPUT_TOKENS = 16  # of an answer that is informative about decoding
MIN_PROMPT_TOKENS = 64  # of a prompt that is informative about prefill
MAX_RUNS = 256  # in the file
MAX_FILE_BYTES = 1_000_000  # that are read
SELF_TEST_FILE = "gpu-selftest.jsonl"  # in the home folder: runs of generated models on its GPUs
COMPARABLE_FACTOR = 4.0  # models that read up to this many times more or fewer bytes per step reach similar rates

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The rates of one answer."""

    model: str
    device: str  # as reported by the device
    dtype: str
    form: str  # most frequent weight format
    threads: int
    context: int  # tokens at the end of the answer
    bytes_per_token: float  # read by a decode step
    tokens_per_s: float
    flops_per_s: float | None  # of prefill; None if the prompt was short

    @property
    def bandwidth(self) -> float:
        return self.bytes_per_token * self.tokens_per_s

    def is_comparable(self, other: "Run") -> bool:
        """Return whether one run predicts the other."""
        setup = ("device", "dtype", "form", "threads")
        similar_bytes = 1 / COMPARABLE_FACTOR <= self.bytes_per_token / other.bytes_per_token <= COMPARABLE_FACTOR
        return similar_bytes and all(getattr(self, name) == getattr(other, name) for name in setup)


def record(home: Path, run: Run, note: Callable[[str], None]) -> None:
    """Append a run, dropping the oldest beyond MAX_RUNS. note: receives the reason if that fails"""
    file = home / "runs.jsonl"
    write(file, [*read(file, note), run][-MAX_RUNS:], note)


def write(file: Path, runs: list[Run], note: Callable[[str], None]) -> None:
    """Replace a file's runs. note: receives the reason if that fails"""
    try:
        write_atomic(file, "".join(json.dumps(asdict(entry)) + "\n" for entry in runs))
    except OSError as error:
        note(f"note: the measurement could not be saved: {error}")


def read(file: Path, note: Callable[[str], None]) -> list[Run]:
    """Return the runs of a file, skipping invalid lines with a note."""
    return read_entries(file, MAX_FILE_BYTES, parse, note)


def read_entries(
    file: Path, limit: int, parse: Callable[[bytes], T | None], note: Callable[[str], None]
) -> list[T]:
    """Return the entries of a file with one per line, skipping invalid lines with a note.

    limit: bytes that are read; parse: returns None for an invalid line
    """
    try:
        with file.open("rb") as stream:
            lines = stream.read(limit).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        note(f"note: {file} cannot be read: {error}")
        return []
    entries = [entry for entry in map(parse, lines) if entry]
    if len(entries) < len(lines):
        note(f"note: {len(lines) - len(entries)} of {len(lines)} lines of {file} are invalid and ignored")
    return entries


def parse(line: bytes) -> Run | None:
    try:
        entry = json.loads(line)
        run = Run(**{field.name: entry[field.name] for field in fields(Run)})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    names = (run.model, run.device, run.dtype, run.form)
    numbers = (run.bytes_per_token, run.tokens_per_s, 1.0 if run.flops_per_s is None else run.flops_per_s)
    is_valid = all(isinstance(name, str) for name in names) and all(map(is_positive, numbers))
    return run if is_valid and type(run.threads) is int else None


def is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and number is not True and 0 < number < math.inf


@dataclass(frozen=True)
class MedianRates:
    """Median rates of several runs."""

    bandwidth: float  # bytes/s of decoding
    flops_per_s: float | None  # of prefill; None if all prompts were too short
    count: int

    @property
    def answers(self) -> str:
        return "one answer" if self.count == 1 else f"{self.count} answers"


def nearest_self_test(file: Path, setup: Run, note: Callable[[str], None]) -> Run | None:
    """Return the run of the self-test with the same device, dtype and format whose steps read the most similar
    number of bytes; None without any.
    """
    names = ("device", "dtype", "form")
    similar = [run for run in read(file, note) if all(getattr(run, n) == getattr(setup, n) for n in names)]
    return min(similar, key=lambda run: abs(math.log(run.bytes_per_token / setup.bytes_per_token)), default=None)


def median_rates(runs: list[Run], setup: Run) -> MedianRates | None:
    """Return the medians of the same model's comparable runs, or of all comparable runs; None without any."""
    comparable = [run for run in runs if run.is_comparable(setup)]
    comparable = [run for run in comparable if run.model == setup.model] or comparable
    if not comparable:
        return None
    prefill_rates = [run.flops_per_s for run in comparable if run.flops_per_s]
    rate = statistics.median(prefill_rates) if prefill_rates else None
    return MedianRates(statistics.median(run.bandwidth for run in comparable), rate, len(comparable))
