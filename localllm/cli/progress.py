"""What a person, a log or a program sees of a download. Writes to stderr, for `--json` to stdout."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from localllm.cli.io import AnswerWriter, is_live, note
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import Order, Show
from localllm.units import seconds, size
from localllm.visible import visible

MOST_BARS = 8  # of files that are done stay in sight
LINE_EVERY_S = 10.0  # in a log
EVENT_EVERY_S = 0.2  # for a program


class Bars:
    """A bar for each file under way and one for all, on a terminal."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.bars: dict[str, TaskID] = {}
        self.all: TaskID | None = None

    def begin(self, order: Order) -> None:
        self.say(summary(order))
        contents = [files[0] for files in order.contents.values()]
        coming = [file for file in contents if order.here[file.digest] < file.size]
        here = order.total_bytes - order.missing_bytes
        if len(coming) > 1:
            self.all = self.progress.add_task("in all", total=order.total_bytes, completed=here)
        for file in coming:
            name = escape(visible(file.path))
            kept = order.here[file.digest]
            self.bars[file.digest] = self.progress.add_task(name, total=file.size, completed=kept, visible=False)

    def advance(self, file: RemoteFile, count: int) -> None:
        bar = self.bars.get(file.digest)
        if bar is not None:
            self.progress.update(bar, advance=count, visible=True)
        if self.all is not None:
            self.progress.update(self.all, advance=count)

    def finish(self, file: RemoteFile) -> None:
        """Another process may have fetched it, too."""
        bar = self.bars.get(file.digest)
        if bar is not None:
            shown = next(task for task in self.progress.tasks if task.id == bar)
            if self.all is not None:
                self.progress.update(self.all, advance=file.size - shown.completed)
            self.progress.update(bar, completed=file.size, visible=len(self.bars) <= MOST_BARS)

    def say(self, text: str) -> None:
        self.progress.console.print(escape(visible(text)), highlight=False)


class Lines:
    """A line now and then, where stderr is no terminal."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = self.done = 0
        self.came = 0  # in this run
        self.start = self.last = time.monotonic()

    def begin(self, order: Order) -> None:
        note(summary(order))
        self.total, self.done = order.total_bytes, order.total_bytes - order.missing_bytes
        self.start = self.last = time.monotonic()

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.done += count
            self.came += max(0, count)  # less than none: what is fetched again
            now = time.monotonic()
            if now - self.last < LINE_EVERY_S:
                return
            self.last = now
            rate = max(1.0, self.came / (now - self.start))
        left = (self.total - self.done) / rate
        note(f"{size(self.done)} of {size(self.total)}, {size(int(rate))}/s, {seconds(left)} left")

    def finish(self, file: RemoteFile) -> None:
        note(f"{file.path}: {size(file.size)}, verified")

    def say(self, text: str) -> None:
        note(text)


class Events:
    """JSON lines, one an event; docs/cli.md lists them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.out = AnswerWriter()
        self.done: dict[str, int] = {}
        self.last: dict[str, float] = {}

    def begin(self, order: Order) -> None:
        self.done = dict(order.here)
        files = [{"path": f.path, "bytes": f.size, "here": order.here[f.digest]} for f in order.files]
        repo, commit = order.listing.repo, order.listing.commit
        missing = order.missing_bytes
        self.write("begin", repo=repo.repo, commit=commit, bytes=order.total_bytes, missing=missing, files=files)

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.done[file.digest] += count
            now = time.monotonic()
            due = now - self.last.get(file.digest, 0.0) >= EVENT_EVERY_S or count < 0
            if due:
                self.last[file.digest] = now
                self._put("progress", path=file.path, done=self.done[file.digest])

    def finish(self, file: RemoteFile) -> None:
        self.write("verified", path=file.path, bytes=file.size)

    def say(self, text: str) -> None:
        self.write("note", text=text)

    def write(self, event: str, **fields: Any) -> None:
        with self.lock:
            self._put(event, **fields)

    def _put(self, event: str, **fields: Any) -> None:
        self.out.write(json.dumps({"event": event, **fields}) + "\n")


def summary(order: Order) -> str:
    """What a pull is going to do, in one line."""
    name, total, missing = order.listing.repo, order.total_bytes, order.missing_bytes
    if not missing:
        return f"{name} is here and up to date ({size(total)})"
    files = f"{len(order.files)} files" if len(order.files) > 1 else "1 file"
    here = f", {size(total - missing)} of them are here" if missing < total else ""
    return f"pulling {name}: {files}, {size(total)}{here}"


@contextmanager
def shown() -> Iterator[Show]:
    """Bars on a terminal, else lines."""
    try:
        if is_live(sys.stderr):
            with _progress() as progress:
                yield Bars(progress)
        else:
            yield Lines()
    except KeyboardInterrupt:
        note("broken off; the same command goes on where it stopped")
        raise


class Parts:
    """Of a model that is quantized: a bar on a terminal, else a line now and then, or an event each."""

    def __init__(self, progress: Progress | None = None, events: Events | None = None):
        self.progress = progress
        self.events = events
        self.task: TaskID | None = None
        self.last = time.monotonic()

    def part(self, name: str, done: int, count: int) -> None:
        """One more is whole."""
        if self.events:
            self.events.write("part", part=name, done=done, of=count)
        elif self.progress:
            if self.task is None:
                self.task = self.progress.add_task("quantizing", total=count)
            self.progress.update(self.task, completed=done)
        elif time.monotonic() - self.last >= LINE_EVERY_S:
            self.last = time.monotonic()
            note(f"{done} of {count} parts are done")

    def write(self, event: str, **fields: Any) -> None:
        """An event of another kind."""
        assert self.events
        self.events.write(event, **fields)


@contextmanager
def parts(*, as_json: bool = False, goes_on: bool = True) -> Iterator[Parts]:
    """Told of each part of a model that is quantized. goes_on: can a later run begin where one is broken off?"""
    try:
        if as_json:
            yield Parts(events=Events())
        elif is_live(sys.stderr):
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
            with Progress(
                *columns, TimeRemainingColumn(compact=True), console=Console(stderr=True), transient=True
            ) as progress:
                yield Parts(progress)
        else:
            yield Parts()
    except KeyboardInterrupt:
        note("broken off; the same command " + ("goes on where it stopped" if goes_on else "begins anew"))
        raise


@contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[int], object]]:
    """One bar on a terminal, gone at its end; gives what is told how many bytes more are done."""
    if not is_live(sys.stderr):
        yield lambda _: None
        return
    with _progress(transient=True) as progress:
        yield partial(progress.advance, progress.add_task(text, total=total))


def _progress(*, transient: bool = False) -> Progress:
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=Console(stderr=True), expand=True, transient=transient)


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """Gives what takes the words for what is being done: on a terminal they leave no trace, elsewhere they are a
    line now and then. Nothing moves on its own, which would take time of what is measured."""
    if not is_live(sys.stderr):
        yield said_now_and_then()
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(visible(text)), refresh=True)


def said_now_and_then() -> Callable[[str], None]:
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            note(text)

    return say
