"""What a person sees of a batch while it runs: a bar on a terminal, else a line now and then. Writes to stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from localllm.batch.summary import BatchCounts, BatchSummary
from localllm.cli.io import note, supports_redraw
from localllm.cli.progress import LINE_INTERVAL_S
from localllm.formatting import format_rate

OnBatchProgress = Callable[[BatchCounts], object]


@contextmanager
def batch_progress(*, resumable: bool) -> Iterator[OnBatchProgress]:
    """Gives what is told of each answer. resumable: can a later run begin where this one is broken off?"""
    try:
        if supports_redraw(sys.stderr):
            columns = (TextColumn("answering"), BarColumn(bar_width=None), MofNCompleteColumn())
            told = (TextColumn("{task.fields[told]}"), TimeRemainingColumn(compact=True))
            with Progress(*columns, *told, console=Console(stderr=True), transient=True) as progress:
                yield BatchBar(progress)
        else:
            yield BatchLines()
    except KeyboardInterrupt:
        note("broken off; the same command goes on where it stopped" if resumable else "broken off")
        raise


class BatchBar:
    def __init__(self, progress: Progress):
        self.progress = progress
        self.task = progress.add_task("", total=None, told="")
        self.start = time.monotonic()

    def __call__(self, counts: BatchCounts) -> None:
        told = format_batch_speed(counts, time.monotonic() - self.start)
        self.progress.update(self.task, total=counts.total, completed=counts.lines, told=told)


class BatchLines:
    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def __call__(self, counts: BatchCounts) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_INTERVAL_S:
            self.last = now
            of = "" if counts.total is None else f" of {counts.total:,}"
            note(f"{counts.lines:,}{of} lines, {format_batch_speed(counts, now - self.start)}")


def format_batch_speed(counts: BatchCounts, elapsed_s: float) -> str:
    speed = format_rate(BatchSummary(counts, elapsed_s, 0).tokens_per_s)
    return f"{speed}, {counts.failed:,} failed" if counts.failed else speed
