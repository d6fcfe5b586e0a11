"""A batch's input and output together: what is done already, and what is left. Knows nothing of the engine."""

import hashlib
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from localllm.batch.lines import MAX_LINE_BYTES, BatchLine, read_line
from localllm.batch.output import OutputFile, OutputStream
from localllm.batch.state import JobState, check_output_empty, check_unchanged, read_state, write_state
from localllm.batch.summary import BatchCounts, BatchSummary
from localllm.errors import UsageError

# The input of a batch, read line by line and never as a whole. Knows nothing of what a line says.
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputContents:
    """What is known of a file before its first line is answered."""

    size_bytes: int  # bytes
    sha256: str
    line_count: int  # that are not empty


def read_contents(file: BinaryIO) -> InputContents:
    """Reads all of it once and goes back to its start."""
    digest = hashlib.sha256()
    lines = sum(1 for _ in iter_lines(file, digest.update))
    size = file.tell()
    file.seek(0, os.SEEK_SET)
    return InputContents(size, digest.hexdigest(), lines)


def iter_lines(file: BinaryIO, on_bytes: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty with its number from 1; a line longer than MAX_LINE_BYTES is cut just
    beyond
    that length. on_bytes: called with all bytes as they are read."""
    number, begins = 0, True
    for piece in iter(partial(file.readline, MAX_LINE_BYTES + 1), b""):
        on_bytes(piece)
        if begins:
            number += 1
            text = piece.removeprefix(BOM) if number == 1 else piece
            if text.strip():
                yield number, text
        begins = piece.endswith(b"\n")


# Which of very many texts came before. Knows nothing of what they are.
class SeenIds:
    """A set on the disk: a nameless database that goes with the process, however it ends, and whose part in memory
    does not grow."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(
            "", isolation_level=None
        )  # "": a temporary file, removed once it is open
        self.connection.execute("PRAGMA journal_mode = OFF")
        self.connection.execute("PRAGMA synchronous = OFF")
        self.connection.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, text: str) -> bool:
        """Is it new?"""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return self.connection.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self.connection.close()


FINGERPRINT_FIELDS = ("localllm", "model", "quant")


class Job:
    """One input on its way into one output. Only a file into a file goes on after it was broken off: a stream
    cannot be read again, nor what went into one."""

    def __init__(self, file: BinaryIO, out: OutputStream, asked: Mapping[str, Any]):
        """Goes past what an earlier run has written. asked: what the answers depend on, `seed` among it; with the
        input's digest it must be what that run was asked for. Raises UsageError where it was not."""
        self.file = file
        self.output = out
        self.requested = dict(asked)
        self.counts = BatchCounts()
        self.seen_ids = SeenIds()
        self.input_stat = os.fstat(file.fileno())
        self.previous: JobState | None = None  # of the run that goes on here
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
        """That an earlier run had, in tokens: a machine with other free memory would choose another."""
        context = self.previous.ran.get("context") if self.previous else None
        return context if type(context) is int else None

    def begin(self, ran: Mapping[str, Any]) -> str:
        """ran: what else the answers depend on, once the model is loaded. Gives the fingerprint of all of it.
        Raises UsageError where an earlier run had something else."""
        if isinstance(self.output, OutputFile):
            if self.previous:
                check_unchanged(self.output.path, self.previous.ran, ran)
            elif self.resumable:
                write_state(self.output.path, JobState(self.requested, ran))
        backend = {name: self.requested.get(name) for name in FINGERPRINT_FIELDS} | dict(ran)
        return "fp_" + hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()[:12]

    def check_input(self) -> None:
        """Raises UsageError where a file was written to while it was read."""
        now = os.fstat(self.file.fileno())
        if self.resumable and (now.st_size, now.st_mtime_ns) != (
            self.input_stat.st_size,
            self.input_stat.st_mtime_ns,
        ):
            raise UsageError("the input was changed while it was answered", "answer it anew, into another file")

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
        for place, text in enumerate(out.complete_lines(), 1):
            try:
                self.counts.add_resumed(ok=_is_ok(json.loads(text), next(lines)))
            except (StopIteration, ValueError, TypeError, KeyError, RecursionError):
                wrong = f"line {place} of {out.path} is not what this batch writes"
                raise UsageError(wrong, "name another file") from None


def _is_ok(answer: Mapping[str, Any], line: BatchLine) -> bool:
    """Has the line been answered, and not failed? Raises ValueError where this is no answer to it."""
    if (answer["id"], answer["custom_id"]) != (f"batch_req_{line.line_id}", line.custom_id):
        raise ValueError
    return answer["response"] is not None and answer["response"]["status_code"] == 200
