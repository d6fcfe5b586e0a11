"""A batch's input and output together: what is done already, and what is left. Knows nothing of the engine."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, BinaryIO

from localllm.batch.input import contents_of, lines_of
from localllm.batch.lines import Line, read_line
from localllm.batch.output import OutFile, Stream
from localllm.batch.seen import Seen
from localllm.batch.state import State, check_nothing_lost, check_same, read_state, write_state
from localllm.batch.summary import Counts, Summary
from localllm.errors import UsageError

OF_THE_BACKEND = ("localllm", "model", "quant")


class Job:
    """One input on its way into one output. Only a file into a file goes on after it was broken off: a stream
    cannot be read again, nor what went into one."""

    def __init__(self, file: BinaryIO, out: Stream, asked: Mapping[str, Any]):
        """Goes past what an earlier run has written. asked: what the answers depend on, `seed` among it; with the
        input's digest it must be what that run was asked for. Raises UsageError where it was not."""
        self.file = file
        self.out = out
        self.asked = dict(asked)
        self.counts = Counts()
        self.seen = Seen()
        self.found = os.fstat(file.fileno())
        self.before: State | None = None  # of the run that goes on here
        self.goes_on = isinstance(out, OutFile) and stat.S_ISREG(self.found.st_mode)
        if self.goes_on:
            contents = contents_of(file)
            self.counts.total = contents.lines
            self.asked["input"] = contents.sha256
        lines = self._read()
        if isinstance(out, OutFile):
            self._go_past_written(out, lines)
        first = next(lines, None)
        self.done = first is None
        self.lines: Iterator[Line] = lines if first is None else chain([first], lines)

    @property
    def context(self) -> int | None:
        """That an earlier run had, in tokens: a machine with other free memory would choose another."""
        context = self.before.ran.get("context") if self.before else None
        return context if type(context) is int else None

    def begin(self, ran: Mapping[str, Any]) -> str:
        """ran: what else the answers depend on, once the model is loaded. Gives the fingerprint of all of it.
        Raises UsageError where an earlier run had something else."""
        if isinstance(self.out, OutFile):
            if self.before:
                check_same(self.out.path, self.before.ran, ran)
            elif self.goes_on:
                write_state(self.out.path, State(self.asked, ran))
        backend = {name: self.asked.get(name) for name in OF_THE_BACKEND} | dict(ran)
        return "fp_" + hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()[:12]

    def check_input(self) -> None:
        """Raises UsageError where a file was written to while it was read."""
        now = os.fstat(self.file.fileno())
        if self.goes_on and (now.st_size, now.st_mtime_ns) != (self.found.st_size, self.found.st_mtime_ns):
            raise UsageError("the input was changed while it was answered", "answer it anew, into another file")

    def summary(self, seconds: float, steps: int) -> Summary:
        return Summary(self.counts, seconds, steps)

    def close(self) -> None:
        self.seen.close()

    def _read(self) -> Iterator[Line]:
        for number, text in lines_of(self.file):
            yield read_line(text, number, self.asked["seed"], self.seen.add)

    def _go_past_written(self, out: OutFile, lines: Iterator[Line]) -> None:
        if out.size and self.goes_on:
            self.before = read_state(out.path)
        if self.before is None:
            check_nothing_lost(out.path, out.size)
            return
        check_same(out.path, self.before.asked, self.asked)
        for place, text in enumerate(out.whole_lines(), 1):
            try:
                self.counts.keep(ok=_is_ok(json.loads(text), next(lines)))
            except (StopIteration, ValueError, TypeError, KeyError, RecursionError):
                wrong = f"line {place} of {out.path} is not what this batch writes"
                raise UsageError(wrong, "name another file") from None


def _is_ok(answer: Mapping[str, Any], line: Line) -> bool:
    """Has the line been answered, and not failed? Raises ValueError where this is no answer to it."""
    if (answer["id"], answer["custom_id"]) != (f"batch_req_{line.key}", line.custom_id):
        raise ValueError
    return answer["response"] is not None and answer["response"]["status_code"] == 200
