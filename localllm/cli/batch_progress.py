"""What a person sees of a batch while it runs: a bar on a terminal, else a line now and then. Writes to stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from localllm.batch.summary import Counts, Summary
from localllm.cli.io import is_live, note
from localllm.cli.progress import LINE_EVERY_S
from localllm.units import rate

Show = Callable[[Counts], object]


@contextmanager
def answering(*, goes_on: bool) -> Iterator[Show]:
    """Gives what is told of each answer. goes_on: can a later run begin where this one is broken off?"""
    try:
        if is_live(sys.stderr):
            columns = (TextColumn("answering"), BarColumn(bar_width=None), MofNCompleteColumn())
            told = (TextColumn("{task.fields[told]}"), TimeRemainingColumn(compact=True))
            with Progress(*columns, *told, console=Console(stderr=True), transient=True) as progress:
                yield Bar(progress)
        else:
            yield Lines()
    except KeyboardInterrupt:
        note("broken off; the same command goes on where it stopped" if goes_on else "broken off")
        raise


class Bar:
    def __init__(self, progress: Progress):
        self.progress = progress
        self.task = progress.add_task("", total=None, told="")
        self.start = time.monotonic()

    def __call__(self, counts: Counts) -> None:
        told = speed_and_failures(counts, time.monotonic() - self.start)
        self.progress.update(self.task, total=counts.total, completed=counts.lines, told=told)


class Lines:
    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def __call__(self, counts: Counts) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_EVERY_S:
            self.last = now
            of = "" if counts.total is None else f" of {counts.total:,}"
            note(f"{counts.lines:,}{of} lines, {speed_and_failures(counts, now - self.start)}")


def speed_and_failures(counts: Counts, elapsed_s: float) -> str:
    speed = rate(Summary(counts, elapsed_s, 0).tokens_per_s)
    return f"{speed}, {counts.failed:,} failed" if counts.failed else speed
