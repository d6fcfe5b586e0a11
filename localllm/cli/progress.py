"""Progress of a download, quantization or load: bars on a terminal, log lines elsewhere, or JSON events."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

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

from localllm.cli.io import StdoutWriter, clear_start_line, note, status, supports_redraw
from localllm.formatting import format_bytes, format_seconds, printable
from localllm.tui.machine import ModelOffer

if TYPE_CHECKING:  # huggingface_hub takes 0.1 s to import
    from localllm.hub.listing import RemoteFile
    from localllm.hub.pull import PullPlan, PullProgress

MAX_VISIBLE_BARS = 8  # with more files, bars of finished files are hidden
LINE_INTERVAL_S = 10.0  # between lines of a log
EVENT_INTERVAL_S = 0.2  # between JSON events of one file


class StderrObserver:
    """`LoadObserver` that shows progress on stderr: one display at a time, of the download, the quantizer or the
    loading. A context manager, whose end erases the display."""

    def __init__(self, name: str):
        self.name = name
        self.stage = ""
        self.display = ExitStack()
        self.download: PullProgress | None = None
        self.quantization: QuantizeProgress | None = None

    def __enter__(self) -> StderrObserver:
        return self

    def phase(self, name: str) -> None:
        stage = name if name in ("download", "quantize") else "load"
        if stage == self.stage:
            return
        self.display.close()
        clear_start_line()
        self.stage, self.quantization = stage, None
        if stage == "load":
            self.display.enter_context(status(f"loading {self.name}"))
        elif stage == "download":
            self.download = self.display.enter_context(download_progress())
        else:
            self.quantization = self.display.enter_context(quantize_progress())

    @property
    def pull(self) -> PullProgress:
        """Progress of the download; requires the phase `download`."""
        assert self.download
        return self.download

    def part(self, done: int, total: int) -> None:
        if self.quantization:
            self.quantization.part("", done, total)

    def about(self, offer: ModelOffer) -> None:
        """Ignored: the summary of the download is enough for one line."""

    def note(self, text: str) -> None:
        note(text)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(error_type, error, trace)


@contextmanager
def download_progress() -> Iterator[PullProgress]:
    """Show progress of a download: bars on a terminal, lines elsewhere."""
    try:
        if supports_redraw(sys.stderr):
            with _download_bars() as progress:
                yield DownloadBars(progress)
        else:
            yield DownloadLines()
    except KeyboardInterrupt:
        note("interrupted; run the same command again to resume")
        raise


def _download_bars(*, transient: bool = False) -> Progress:
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=Console(stderr=True), expand=True, transient=transient)


class DownloadBars:
    """Progress bars of a download: one for each file that is being downloaded, and one for the total."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.task_ids: dict[str, TaskID] = {}
        self.total_task_id: TaskID | None = None

    def begin(self, plan: PullPlan) -> None:
        self.say(pull_summary(plan))
        unique_files = [files[0] for files in plan.contents.values()]
        missing = [file for file in unique_files if plan.cached_bytes[file.digest] < file.size]
        if len(missing) > 1:
            cached_bytes = plan.total_bytes - plan.missing_bytes
            self.total_task_id = self.progress.add_task("total", total=plan.total_bytes, completed=cached_bytes)
        for file in missing:
            self.task_ids[file.digest] = self.progress.add_task(
                escape(printable(file.path)),
                total=file.size,
                completed=plan.cached_bytes[file.digest],
                visible=False,
            )

    def advance(self, file: RemoteFile, count: int) -> None:
        task_id = self.task_ids.get(file.digest)
        if task_id is not None:
            self.progress.update(task_id, advance=count, visible=True)
        if self.total_task_id is not None:
            self.progress.update(self.total_task_id, advance=count)

    def finish(self, file: RemoteFile) -> None:
        """Complete the bar of a file, which another process may have downloaded."""
        task_id = self.task_ids.get(file.digest)
        if task_id is not None:
            task = next(task for task in self.progress.tasks if task.id == task_id)
            if self.total_task_id is not None:
                self.progress.update(self.total_task_id, advance=file.size - task.completed)
            self.progress.update(task_id, completed=file.size, visible=len(self.task_ids) <= MAX_VISIBLE_BARS)

    def say(self, text: str) -> None:
        self.progress.console.print(escape(printable(text)), highlight=False)


class DownloadLines:
    """Log lines of a download, at most one per LINE_INTERVAL_S."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total_bytes = self.done_bytes = 0
        self.received_bytes = 0  # in this run
        self.start = self.last = time.monotonic()

    def begin(self, plan: PullPlan) -> None:
        note(pull_summary(plan))
        self.total_bytes, self.done_bytes = plan.total_bytes, plan.total_bytes - plan.missing_bytes
        self.start = self.last = time.monotonic()

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.done_bytes += count
            self.received_bytes += max(0, count)  # negative when a part is downloaded again
            now = time.monotonic()
            if now - self.last < LINE_INTERVAL_S:
                return
            self.last = now
            rate = max(1.0, self.received_bytes / (now - self.start))
        remaining_s = (self.total_bytes - self.done_bytes) / rate
        note(
            f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}, "
            f"{format_bytes(int(rate))}/s, {format_seconds(remaining_s)} left"
        )

    def finish(self, file: RemoteFile) -> None:
        note(f"{file.path}: {format_bytes(file.size)}, verified")

    def say(self, text: str) -> None:
        note(text)


class JsonEvents:
    """Progress events as JSON lines on stdout; docs/cli.md lists them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.out = StdoutWriter()
        self.done_bytes: dict[str, int] = {}
        self.last: dict[str, float] = {}

    def begin(self, plan: PullPlan) -> None:
        self.done_bytes = dict(plan.cached_bytes)
        files = [{"path": f.path, "bytes": f.size, "here": plan.cached_bytes[f.digest]} for f in plan.files]
        self.write(
            "begin",
            repo=plan.listing.repo.repo,
            commit=plan.listing.commit,
            bytes=plan.total_bytes,
            missing=plan.missing_bytes,
            files=files,
        )

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.done_bytes[file.digest] += count
            now = time.monotonic()
            due = now - self.last.get(file.digest, 0.0) >= EVENT_INTERVAL_S or count < 0
            if due:
                self.last[file.digest] = now
                self._write("progress", path=file.path, done=self.done_bytes[file.digest])

    def finish(self, file: RemoteFile) -> None:
        self.write("verified", path=file.path, bytes=file.size)

    def say(self, text: str) -> None:
        self.write("note", text=text)

    def write(self, event: str, **fields: Any) -> None:
        with self.lock:
            self._write(event, **fields)

    def _write(self, event: str, **fields: Any) -> None:
        self.out.write(json.dumps({"event": event, **fields}) + "\n")


def pull_summary(plan: PullPlan) -> str:
    """One line that says what a pull is about to download."""
    name, total, missing = plan.listing.repo, plan.total_bytes, plan.missing_bytes
    if not missing:
        return f"{name} is up to date ({format_bytes(total)})"
    files = f"{len(plan.files)} files" if len(plan.files) > 1 else "1 file"
    cached = f", {format_bytes(total - missing)} already downloaded" if missing < total else ""
    return f"pulling {name}: {files}, {format_bytes(total)}{cached}"


class QuantizeProgress:
    """Progress of quantization: a bar on a terminal, lines elsewhere, or JSON events."""

    def __init__(self, progress: Progress | None = None, events: JsonEvents | None = None):
        self.progress = progress
        self.events = events
        self.task: TaskID | None = None
        self.last = time.monotonic()

    def part(self, name: str, done: int, count: int) -> None:
        """Report that `done` of `count` parts are quantized, of which `name` is the last."""
        if self.events:
            self.events.write("part", part=name, done=done, of=count)
        elif self.progress:
            if self.task is None:
                self.task = self.progress.add_task("quantizing", total=count)
            self.progress.update(self.task, completed=done)
        elif time.monotonic() - self.last >= LINE_INTERVAL_S:
            self.last = time.monotonic()
            note(f"{done} of {count} parts quantized")

    def write(self, event: str, **fields: Any) -> None:
        """Write another JSON event."""
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
        note("interrupted; run the same command again to " + ("resume" if resumable else "start over"))
        raise


@contextmanager
def byte_progress(text: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show one bar on a terminal and erase it at the end; yield a function that advances it by a number of
    bytes."""
    if not supports_redraw(sys.stderr):
        yield lambda _: None
        return
    with _download_bars(transient=True) as progress:
        yield partial(progress.advance, progress.add_task(text, total=total))


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current activity: on a terminal in one line that is erased at the end,
    elsewhere in an occasional log line. Nothing is animated, because that would disturb a measurement."""
    if not supports_redraw(sys.stderr):
        yield throttled_note()
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(printable(text)), refresh=True)


def throttled_note() -> Callable[[str], None]:
    """Function that prints a note, at most one per LINE_INTERVAL_S."""
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_INTERVAL_S:
            last = time.monotonic()
            note(text)

    return say
