"""A batch's input and output: what is done already, and what remains. Independent of the engine.

Whole lines are appended to an output file, so that a process may be killed at any byte: a later run finds complete
lines and at most one partial line, which it removes.
"""

import fcntl
import hashlib
import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from localllm.batch.lines import MAX_LINE_BYTES, BatchLine, read_line
from localllm.batch.summary import BatchCounts, BatchSummary
from localllm.errors import DamagedModel, UsageError
from localllm.files import explain_disk_errors, read_json, write_atomic

STATE_FORMAT = 1
BOM = b"\xef\xbb\xbf"
FINGERPRINT_FIELDS = ("localllm", "model", "quant")
SYNC_EVERY_S = 1.0  # of an output file


class OutputStream:
    """Stdout, a pipe, or a device: output cannot be read back."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def write(self, lines: bytes) -> None:
        """Write all of it, since the system may accept less at once."""
        remaining = memoryview(lines)
        while remaining:
            remaining = remaining[os.write(self.descriptor, remaining) :]

    def close(self) -> None:
        """Leave the descriptor open: it belongs to the caller."""


class OutputFile(OutputStream):
    """A file, locked by this process while it is open."""

    def __init__(self, path: Path):
        """Raises UsageError if another process is writing it, or it cannot be written."""
        self.path = path
        self.last_sync = time.monotonic()
        with explain_disk_errors(path.parent, "use a file that can"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except (FileNotFoundError, IsADirectoryError) as error:
                raise UsageError(f"{path} cannot be written ({error.strerror})", "use a file that can") from None
        super().__init__(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"another process is writing {path}", "wait for it, or use another file") from None

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def complete_lines(self) -> Iterator[bytes]:
        """Yield the existing complete lines; afterwards the file is truncated to the end of the last one."""
        end = 0
        with open(self.descriptor, "rb", closefd=False) as file:
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                end += len(line)
                yield line
            if len(line) == MAX_LINE_BYTES:
                raise UsageError(f"{self.path} has a line that was not written by a batch", "use another file")
        os.ftruncate(self.descriptor, end)
        os.lseek(self.descriptor, end, os.SEEK_SET)

    def write(self, lines: bytes) -> None:
        """Raises DiskFull. A resuming run removes a line that was partially written to a full disk."""
        with explain_disk_errors(self.path.parent, resumable=True):
            super().write(lines)
            if time.monotonic() - self.last_sync >= SYNC_EVERY_S:
                os.fsync(self.descriptor)
                self.last_sync = time.monotonic()

    def close(self) -> None:
        with explain_disk_errors(self.path.parent, resumable=True):
            os.fsync(self.descriptor)
        os.close(self.descriptor)


def is_stream(path: Path) -> bool:
    """Whether the path exists and is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


@dataclass(frozen=True)
class JobState:
    """Parameters that the lines of an output depend on, stored in `OUT.state`, so that a run can resume or refuse
    to.
    """

    asked: Mapping[str, Any]
    """The requested settings: the input's digest, the model's name, seed, limits, options."""

    ran: Mapping[str, Any] = field(default_factory=dict)
    """The settings that were used: device, number formats, context, the model's files."""

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


def check_unchanged(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError for the first difference."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
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


@dataclass(frozen=True)
class InputContents:
    """Properties of a file, determined before its first line is answered."""

    size_bytes: int  # bytes
    sha256: str
    line_count: int  # non-empty lines


def read_contents(file: BinaryIO) -> InputContents:
    """Read the whole file once and return to its start."""
    digest = hashlib.sha256()
    lines = sum(1 for _ in iter_lines(file, digest.update))
    size = file.tell()
    file.seek(0, os.SEEK_SET)
    return InputContents(size, digest.hexdigest(), lines)


def iter_lines(file: BinaryIO, on_bytes: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """Yield each non-empty line with its number from 1; a line longer than MAX_LINE_BYTES is cut one byte beyond
    it.

    Never reads the file as a whole. on_bytes: called with all bytes as they are read.
    """
    number, at_line_start = 0, True
    for chunk in iter(partial(file.readline, MAX_LINE_BYTES + 1), b""):
        on_bytes(chunk)
        if at_line_start:
            number += 1
            text = chunk.removeprefix(BOM) if number == 1 else chunk
            if text.strip():
                yield number, text
        at_line_start = chunk.endswith(b"\n")


class Job:
    """The processing of one input into one output. Only from file to file can it resume after an interruption:
    streams cannot be read again.
    """

    def __init__(self, file: BinaryIO, out: OutputStream, asked: Mapping[str, Any]):
        """Skip what an earlier run has written. asked: what the answers depend on, including `seed`; with the
        input's digest it must equal that of the earlier run. Raises UsageError otherwise.
        """
        self.file = file
        self.output = out
        self.requested = dict(asked)
        self.counts = BatchCounts()
        self.seen_ids = SeenIds()
        self.input_stat = os.fstat(file.fileno())
        self.previous: JobState | None = None  # of the run being resumed
        self.resumable = isinstance(out, OutputFile) and stat.S_ISREG(self.input_stat.st_mode)
        if self.resumable:
            contents = read_contents(file)
            self.counts.total = contents.line_count
            self.requested["input"] = contents.sha256
        lines = self._read()
        if isinstance(out, OutputFile):
            self._go_past_written(out, lines)
        first = next(lines, None)
        self.nothing_left = first is None
        self.lines: Iterator[BatchLine] = lines if first is None else chain([first], lines)

    @property
    def context(self) -> int | None:
        """The earlier run's context in tokens: with different free memory, another one would be chosen."""
        context = self.previous.ran.get("context") if self.previous else None
        return context if type(context) is int else None

    def begin(self, ran: Mapping[str, Any]) -> str:
        """Return a fingerprint of everything the answers depend on. ran: the part known only after the model is
        loaded. Raises UsageError if it differs from an earlier run's.
        """
        if isinstance(self.output, OutputFile):
            if self.previous:
                check_unchanged(self.output.path, self.previous.ran, ran)
            elif self.resumable:
                write_state(self.output.path, JobState(self.requested, ran))
        backend = {name: self.requested.get(name) for name in FINGERPRINT_FIELDS} | dict(ran)
        return "fp_" + hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()[:12]

    def check_input(self) -> None:
        """Raises UsageError if the input file was modified while it was read."""
        now = os.fstat(self.file.fileno())
        if self.resumable and (now.st_size, now.st_mtime_ns) != (
            self.input_stat.st_size,
            self.input_stat.st_mtime_ns,
        ):
            raise UsageError("the input changed during the batch", "run it again, with another output file")

    def summary(self, seconds: float, steps: int) -> BatchSummary:
        return BatchSummary(self.counts, seconds, steps)

    def close(self) -> None:
        self.seen_ids.close()

    def _read(self) -> Iterator[BatchLine]:
        for number, text in iter_lines(self.file):
            yield read_line(text, number, self.requested["seed"], self.seen_ids.add)

    def _go_past_written(self, out: OutputFile, lines: Iterator[BatchLine]) -> None:
        if out.size and self.resumable:
            self.previous = read_state(out.path)
        if self.previous is None:
            check_output_empty(out.path, out.size)
            return
        check_unchanged(out.path, self.previous.asked, self.requested)
        for number, text in enumerate(out.complete_lines(), 1):
            try:
                self.counts.add_resumed(ok=_is_ok(json.loads(text), next(lines)))
            except (StopIteration, ValueError, TypeError, KeyError, RecursionError):
                problem = f"line {number} of {out.path} was not written by this batch"
                raise UsageError(problem, "use another file") from None


def _is_ok(answer: Mapping[str, Any], line: BatchLine) -> bool:
    """Whether the line was answered successfully. Raises ValueError if this is not its answer."""
    if (answer["id"], answer["custom_id"]) != (f"batch_req_{line.line_id}", line.custom_id):
        raise ValueError
    return answer["response"] is not None and answer["response"]["status_code"] == 200


class SeenIds:
    """A very large set of texts on disk: an unnamed database that disappears with the process, however it ends.

    Its memory use does not grow.
    """

    def __init__(self) -> None:
        self.connection = sqlite3.connect(
            "", isolation_level=None
        )  # "": a temporary file, removed once it is open
        self.connection.execute("PRAGMA journal_mode = OFF")
        self.connection.execute("PRAGMA synchronous = OFF")
        self.connection.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, text: str) -> bool:
        """Add a text; return whether it is new."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return self.connection.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self.connection.close()
