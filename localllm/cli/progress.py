"""What a person or a log sees on stderr of a model on its way: pulled, quantized, loaded. `Watch` of one."""

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from localllm.cli.io import clear_sign_of_life, note, status
from localllm.tui.machine import ModelOffer

if TYPE_CHECKING:
    pass
    from localllm.hub.pull import PullProgress
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

from localllm.cli.io import StdoutWriter, supports_redraw
from localllm.formatting import format_bytes, format_seconds, printable
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import PullPlan, PullProgress

# What a person, a log or a program sees of a download. Writes to stderr, for `--json` to stdout.
MAX_VISIBLE_BARS = 8  # of files that are done stay in sight
LINE_INTERVAL_S = 10.0  # in a log
EVENT_INTERVAL_S = 0.2  # for a program


class DownloadBars:
    """A bar for each file under way and one for all, on a terminal."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.task_ids: dict[str, TaskID] = {}
        self.total_task_id: TaskID | None = None

    def begin(self, order: PullPlan) -> None:
        self.say(pull_summary(order))
        contents = [files[0] for files in order.contents.values()]
        coming = [file for file in contents if order.cached_bytes[file.digest] < file.size]
        here = order.total_bytes - order.missing_bytes
        if len(coming) > 1:
            self.total_task_id = self.progress.add_task("in all", total=order.total_bytes, completed=here)
        for file in coming:
            name = escape(printable(file.path))
            kept = order.cached_bytes[file.digest]
            self.task_ids[file.digest] = self.progress.add_task(
                name, total=file.size, completed=kept, visible=False
            )

    def advance(self, file: RemoteFile, count: int) -> None:
        bar = self.task_ids.get(file.digest)
        if bar is not None:
            self.progress.update(bar, advance=count, visible=True)
        if self.total_task_id is not None:
            self.progress.update(self.total_task_id, advance=count)

    def finish(self, file: RemoteFile) -> None:
        """Another process may have fetched it, too."""
        bar = self.task_ids.get(file.digest)
        if bar is not None:
            shown = next(task for task in self.progress.tasks if task.id == bar)
            if self.total_task_id is not None:
                self.progress.update(self.total_task_id, advance=file.size - shown.completed)
            self.progress.update(bar, completed=file.size, visible=len(self.task_ids) <= MAX_VISIBLE_BARS)

    def say(self, text: str) -> None:
        self.progress.console.print(escape(printable(text)), highlight=False)


class DownloadLines:
    """A line now and then, where stderr is no terminal."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total_bytes = self.done_bytes = 0
        self.received_bytes = 0  # in this run
        self.start = self.last = time.monotonic()

    def begin(self, order: PullPlan) -> None:
        note(pull_summary(order))
        self.total_bytes, self.done_bytes = order.total_bytes, order.total_bytes - order.missing_bytes
        self.start = self.last = time.monotonic()

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.done_bytes += count
            self.received_bytes += max(0, count)  # less than none: what is fetched again
            now = time.monotonic()
            if now - self.last < LINE_INTERVAL_S:
                return
            self.last = now
            rate = max(1.0, self.received_bytes / (now - self.start))
        left = (self.total_bytes - self.done_bytes) / rate
        note(
            f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}, "
            f"{format_bytes(int(rate))}/s, {format_seconds(left)} left"
        )

    def finish(self, file: RemoteFile) -> None:
        note(f"{file.path}: {format_bytes(file.size)}, verified")

    def say(self, text: str) -> None:
        note(text)


class JsonEvents:
    """JSON lines, one an event; docs/cli.md lists them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.out = StdoutWriter()
        self.done_bytes: dict[str, int] = {}
        self.last: dict[str, float] = {}

    def begin(self, order: PullPlan) -> None:
        self.done_bytes = dict(order.cached_bytes)
        files = [{"path": f.path, "bytes": f.size, "here": order.cached_bytes[f.digest]} for f in order.files]
        repo, commit = order.listing.repo, order.listing.commit
        missing = order.missing_bytes
        self.write("begin", repo=repo.repo, commit=commit, bytes=order.total_bytes, missing=missing, files=files)

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.done_bytes[file.digest] += count
            now = time.monotonic()
            due = now - self.last.get(file.digest, 0.0) >= EVENT_INTERVAL_S or count < 0
            if due:
                self.last[file.digest] = now
                self._put("progress", path=file.path, done=self.done_bytes[file.digest])

    def finish(self, file: RemoteFile) -> None:
        self.write("verified", path=file.path, bytes=file.size)

    def say(self, text: str) -> None:
        self.write("note", text=text)

    def write(self, event: str, **fields: Any) -> None:
        with self.lock:
            self._put(event, **fields)

    def _put(self, event: str, **fields: Any) -> None:
        self.out.write(json.dumps({"event": event, **fields}) + "\n")


def pull_summary(order: PullPlan) -> str:
    """What a pull is going to do, in one line."""
    name, total, missing = order.listing.repo, order.total_bytes, order.missing_bytes
    if not missing:
        return f"{name} is here and up to date ({format_bytes(total)})"
    files = f"{len(order.files)} files" if len(order.files) > 1 else "1 file"
    here = f", {format_bytes(total - missing)} of them are here" if missing < total else ""
    return f"pulling {name}: {files}, {format_bytes(total)}{here}"


@contextmanager
def download_progress() -> Iterator[PullProgress]:
    """Bars on a terminal, else lines."""
    try:
        if supports_redraw(sys.stderr):
            with _download_bars() as progress:
                yield DownloadBars(progress)
        else:
            yield DownloadLines()
    except KeyboardInterrupt:
        note("broken off; the same command goes on where it stopped")
        raise


class QuantizeProgress:
    """Of a model that is quantized: a bar on a terminal, else a line now and then, or an event each."""

    def __init__(self, progress: Progress | None = None, events: JsonEvents | None = None):
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
        elif time.monotonic() - self.last >= LINE_INTERVAL_S:
            self.last = time.monotonic()
            note(f"{done} of {count} parts are done")

    def write(self, event: str, **fields: Any) -> None:
        """An event of another kind."""
        assert self.events
        self.events.write(event, **fields)


@contextmanager
def quantize_progress(*, as_json: bool = False, resumable: bool = True) -> Iterator[QuantizeProgress]:
    """Show progress while a model is quantized. resumable: whether an interrupted run can be continued."""
    try:
        if as_json:
            yield QuantizeProgress(events=JsonEvents())
        elif supports_redraw(sys.stderr):
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
            with Progress(
                *columns, TimeRemainingColumn(compact=True), console=Console(stderr=True), transient=True
            ) as progress:
                yield QuantizeProgress(progress)
        else:
            yield QuantizeProgress()
    except KeyboardInterrupt:
        note("broken off; the same command " + ("goes on where it stopped" if resumable else "begins anew"))
        raise


@contextmanager
def byte_progress(text: str, total: int) -> Iterator[Callable[[int], object]]:
    """One bar on a terminal, gone at its end; gives what is told how many bytes more are done."""
    if not supports_redraw(sys.stderr):
        yield lambda _: None
        return
    with _download_bars(transient=True) as progress:
        yield partial(progress.advance, progress.add_task(text, total=total))


def _download_bars(*, transient: bool = False) -> Progress:
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=Console(stderr=True), expand=True, transient=transient)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Gives what takes the words for what is being done: on a terminal they leave no trace, elsewhere they are a
    line now and then. Nothing moves on its own, which would take time of what is measured."""
    if not supports_redraw(sys.stderr):
        yield throttled_note()
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(printable(text)), refresh=True)


def throttled_note() -> Callable[[str], None]:
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_INTERVAL_S:
            last = time.monotonic()
            note(text)

    return say


class StderrWatch:
    """`with` it, so that what is drawn ends with what it shows. One display at a time: of the download, of the
    quantizer, of the loading."""

    def __init__(self, name: str):
        self.name = name
        self.stage = ""
        self.display = ExitStack()
        self.download: PullProgress | None = None
        self.quantization: QuantizeProgress | None = None

    @property
    def pull(self) -> "PullProgress":
        """Of the phase `download`."""
        assert self.download
        return self.download

    def phase(self, name: str) -> None:
        kind = name if name in ("download", "quantize") else "load"
        if kind == self.stage:
            return
        self.display.close()
        clear_sign_of_life()
        self.stage, self.quantization = kind, None
        if kind == "load":
            self.display.enter_context(status(f"loading {self.name}"))
            return
        pass  # Rich: 60 ms that a model that is here need not wait for

        if kind == "download":
            self.download = self.display.enter_context(download_progress())
        else:
            self.quantization = self.display.enter_context(quantize_progress())

    def part(self, done: int, total: int) -> None:
        if self.quantization:
            self.quantization.part("", done, total)

    def about(self, offer: ModelOffer) -> None:
        """The summary of the pull says what a line has room for."""

    def note(self, text: str) -> None:
        note(text)

    def __enter__(self) -> "StderrWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(kind, error, trace)
