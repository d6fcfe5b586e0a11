"""A model being downloaded, quantized and loaded: the task, on a thread of its own so that the screen never waits,
and the screen that shows its progress, or why it failed.

Sizes are in bytes; times are in seconds of the task's clock.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm.conversation.model import Model
from localllm.errors import LocalLLMError
from localllm.formatting import format_bytes, format_seconds, one_line
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import PullPlan
from localllm.tui.machine import Cancelled, Machine, ModelOffer, memory_and_speed, parameters_and_license

DOWNLOAD, QUANTIZE = "download", "quantize"  # names of phases

MAX_FILES = 6  # shown of a download, besides the total
MAX_NOTES = 3
TOTAL_NAME = "total"
DONE_STYLE, FAILED_STYLE, DIM_STYLE, ACTIVE_STYLE = "green", "red", "dim", "bold"

FRAMES_PER_S = 20
MAX_COLUMNS, BORDER_COLUMNS = 100, 4  # cells, as in DEFAULT_CSS below
SHOW_AFTER_S = 0.3  # a model that loads faster shows no screen

LOADING_KEYS = "Esc Cancel"
CONFIRM_STOP_KEYS = "Stop the download? It will resume from here the next time.   Y Stop   N Continue"
STOPPING_TEXT = "Stopping …"
FAILED_KEYS = "R Try again   Esc Back"


@dataclass
class FileDownload:
    """Progress of one file of a download."""

    path: str
    size_bytes: int
    done_bytes: int  # including those of an earlier, interrupted download
    began: float | None = None  # time of its first bytes
    received_bytes: int = 0  # by this task
    verified: bool = False

    def rate(self, now: float) -> float | None:
        """Return bytes per second, None before the first ones."""
        if self.began is None or not self.received_bytes or now <= self.began:
            return None
        return self.received_bytes / (now - self.began)


@dataclass
class Phase:
    """A phase of opening a model, such as `download`."""

    name: str
    began: float
    ended: float | None = None
    done: int = 0
    total: int = 0  # 0 if the phase reports no progress


@dataclass(eq=False)
class LoadTask:
    """Opens a model as its `LoadObserver`. Once `finished`, `model` or `error` is set, or neither if cancelled."""

    machine: Machine
    name: str
    clock: Callable[[], float] = time.perf_counter
    offer: ModelOffer | None = None
    files: dict[str, FileDownload] = field(default_factory=dict)  # by digest, those to be downloaded
    here_bytes: int = 0  # files of the download that were complete before
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model: Model | None = None
    error: Exception | None = None
    finished: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.began = self.clock()
        self.thread = threading.Thread(target=self.run, name="localllm-open", daemon=True)
        self.thread.start()

    def run(self) -> None:
        model, error = None, None
        try:
            model = self.machine.open(self.name, self)
        except Cancelled:
            pass
        except (LocalLLMError, OSError) as caught:
            error = caught
        except Exception as caught:  # shown on the screen like any other error
            error = LocalLLMError(f"{type(caught).__name__}: {caught}", "this is a bug in localllm")
        if error:
            error.__cause__ = error.__context__ = error.__traceback__ = None  # frames would keep weights alive
        with self.lock:
            self.end_phase()
            unwanted = model if self.cancelled else None
            self.model = None if self.cancelled else model
            self.error = error
            self.finished = True
        if unwanted:
            unwanted.close()

    def take(self) -> Model | None:
        """Return the model once it is ready, and leave closing it to the caller."""
        with self.lock:
            model, self.model = self.model, None
            return model

    def cancel(self) -> None:
        """Stop opening the model, and close it if it is ready and not taken."""
        with self.lock:
            self.cancelled = True
        if ready := self.take():
            ready.close()

    @property
    def current_phase(self) -> str | None:
        """Name of the current phase, None between phases."""
        return self.phases[-1].name if self.phases and self.phases[-1].ended is None else None

    @property
    def pull(self) -> "LoadTask":
        return self

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise Cancelled

    def about(self, offer: ModelOffer) -> None:
        self.raise_if_cancelled()
        self.offer = offer

    def phase(self, name: str) -> None:
        self.raise_if_cancelled()
        if self.current_phase != name:
            self.end_phase()
            self.phases.append(Phase(name, self.clock()))

    def end_phase(self) -> None:
        if self.current_phase:
            self.phases[-1].ended = self.clock()

    def part(self, done: int, total: int) -> None:
        self.raise_if_cancelled()
        self.phases[-1].done, self.phases[-1].total = done, total

    def note(self, text: str) -> None:
        self.raise_if_cancelled()
        self.notes.append(text)

    def begin(self, order: PullPlan) -> None:
        self.raise_if_cancelled()
        contents = [same[0] for same in order.contents.values()]
        self.here_bytes = sum(file.size for file in contents if order.cached_bytes[file.digest] == file.size)
        self.files = {
            file.digest: FileDownload(file.path, file.size, order.cached_bytes[file.digest])
            for file in contents
            if order.cached_bytes[file.digest] < file.size
        }

    def advance(self, file: RemoteFile, count: int) -> None:
        self.raise_if_cancelled()
        if download := self.files.get(file.digest):
            with self.lock:
                download.began = self.clock() if download.began is None else download.began
                download.done_bytes += count
                download.received_bytes += max(0, count)  # negative: a part has to be fetched again

    def finish(self, file: RemoteFile) -> None:
        """Mark a file as verified, including one that another process has downloaded."""
        self.raise_if_cancelled()
        if download := self.files.get(file.digest):
            download.done_bytes, download.verified = download.size_bytes, True

    def say(self, text: str) -> None:
        self.note(text)


class LoadScreen(ModalScreen[Model | None]):
    """Returns the loaded model, or None to go back."""

    BINDING_GROUP_TITLE = "Loading"
    DEFAULT_CSS = """
    LoadScreen { align: center middle; }
    LoadScreen.unseen { background: transparent; }
    LoadScreen.unseen #load { display: none; }
    LoadScreen #load {
        width: 90%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    LoadScreen #load_page { height: auto; }
    LoadScreen #load_keys { height: auto; margin-top: 1; color: $text-muted; }
    """
    BINDINGS: ClassVar = [
        Binding("escape", "leave", "Cancel", show=False),
        Binding("y,enter", "stop", "Stop", show=False),
        Binding("n", "go_on", "Continue", show=False),
        Binding("r", "again", "Try again", show=False),
    ]

    def __init__(self, machine: Machine, name: str, clock: Callable[[], float] = time.perf_counter):
        super().__init__(classes="unseen")
        self.machine = machine
        self.model_name = name
        self.clock = clock
        self.load_task = LoadTask(machine, name, clock)
        self.confirming_stop = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="load"):
            yield Static(id="load_page", markup=False)
            yield Static(id="load_keys", markup=False)

    def on_mount(self) -> None:
        self.set_interval(1 / FRAMES_PER_S, self.draw)

    def draw(self) -> None:
        """Show the progress, and dismiss the screen when the model is ready."""
        task = self.load_task
        if not self.is_current:
            return
        if task.finished and not task.error:
            self.dismiss(task.take())
            return
        self.confirming_stop = self.confirming_stop and self.is_downloading
        now = self.clock()
        if task.error or now - task.began >= SHOW_AFTER_S:
            self.remove_class("unseen")
        page = self.query_one("#load_page", Static)
        # The page has no width until it is visible.
        width = page.size.width or min(MAX_COLUMNS, self.size.width * 9 // 10) - BORDER_COLUMNS
        page.update(render_load(task, now, width))
        self.query_one("#load_keys", Static).update(Text(self.key_hint))

    @property
    def key_hint(self) -> str:
        if self.load_task.error:
            return FAILED_KEYS
        if self.load_task.cancelled:
            return STOPPING_TEXT
        return CONFIRM_STOP_KEYS if self.confirming_stop else LOADING_KEYS

    @property
    def takes_answers(self) -> bool:
        """Whether letters are answers to a question on this screen."""
        return self.confirming_stop or self.load_task.error is not None

    @property
    def is_downloading(self) -> bool:
        return self.load_task.current_phase == DOWNLOAD and bool(self.load_task.files)

    def action_leave(self) -> None:
        """Go back; during a download, ask first."""
        if self.load_task.error:
            self.dismiss(None)
        elif self.is_downloading and not self.confirming_stop:
            self.confirming_stop = True
        elif self.confirming_stop:
            self.confirming_stop = False
        else:
            self.stop()

    def action_stop(self) -> None:
        if self.confirming_stop:
            self.stop()

    def action_go_on(self) -> None:
        self.confirming_stop = False

    def action_again(self) -> None:
        if self.load_task.error:
            self.load_task = LoadTask(self.machine, self.model_name)

    def stop(self) -> None:
        """Cancel the task. A download ends soon by itself; loading is waited for, so that its memory is free."""
        was_downloading = self.is_downloading
        self.load_task.cancel()
        if was_downloading:
            self.dismiss(None)

    def on_unmount(self) -> None:
        self.load_task.cancel()


def render_load(task: LoadTask, now: float, width: int) -> Text:
    """Return the whole page. width: in cells"""
    blocks = [model_lines(task, width)]
    if task.files and task.current_phase == DOWNLOAD:
        blocks.append(download_lines(task, now, width))
    if task.phases:
        blocks.append(join_lines([phase_line(task, phase, now, width) for phase in task.phases]))
    if task.error:
        blocks.append(error_lines(task.error))
    elif task.notes and task.current_phase:
        blocks.append(Text("\n".join(one_line(note) for note in task.notes[-MAX_NOTES:]), DIM_STYLE))
    return Text("\n\n").join(blocks)


def join_lines(rows: list[Text]) -> Text:
    return Text("\n").join(rows)


def model_lines(task: LoadTask, width: int) -> Text:
    """Return the model's name and description, its download size, and whether it fits."""
    rows = [Text(elide_middle(task.name, width), ACTIVE_STYLE)]
    if offer := task.offer:
        if offer.about:
            rows.append(Text(one_line(offer.about)))
        rows.append(
            Text(
                parameters_and_license(offer)
                + (f" · {format_bytes(offer.bytes)} to download" if offer.bytes else "")
            )
        )
        if fit := memory_and_speed(offer):
            rows.append(Text(fit, "" if offer.fits else FAILED_STYLE))
    return join_lines(rows)


def download_lines(task: LoadTask, now: float, width: int) -> Text:
    """Return a line for all verified files, one for each of the others, and the total."""
    files = list(task.files.values())
    verified = [file for file in files if file.verified]
    unfinished = [file for file in files if not file.verified]
    unfinished.sort(key=lambda file: file.began is None)
    shown = unfinished[:MAX_FILES]
    rows = [Text(f"✓ {files_summary(verified)} verified", DONE_STYLE)] if verified else []
    rows += [file_line(file, now, width) for file in shown]
    if len(unfinished) > len(shown):
        rows.append(Text(f"  {len(unfinished) - len(shown)} more waiting", DIM_STYLE))
    if len(files) > 1:
        rows.append(file_line(total_download(files, task.here_bytes), now, width))
    return join_lines(rows)


def files_summary(files: list[FileDownload]) -> str:
    if len(files) == 1:
        return f"{one_line(files[0].path)}, {format_bytes(files[0].size_bytes)},"
    return f"{len(files)} files, {format_bytes(sum(file.size_bytes for file in files))},"


def total_download(files: list[FileDownload], here_bytes: int) -> FileDownload:
    start_times = [file.began for file in files if file.began is not None]
    total, done = sum(file.size_bytes for file in files), sum(file.done_bytes for file in files)
    received = sum(file.received_bytes for file in files)
    began = min(start_times, default=None)
    return FileDownload(TOTAL_NAME, here_bytes + total, here_bytes + done, began, received)


def file_line(file: FileDownload, now: float, width: int) -> Text:
    rate, left = file.rate(now), file.size_bytes - file.done_bytes
    speed = (
        f"{f'{format_bytes(rate)}/s':>9} {f'{rough_duration(left / rate)} left':>11}" if rate and left > 0 else ""
    )
    if left <= 0 and not file.verified and file.path != TOTAL_NAME:
        speed = "verifying"
    progress = f"{format_bytes(file.done_bytes):>7} of {format_bytes(file.size_bytes):<7} {speed:<21}"
    rest = max(8, width - len(progress) - 3)  # for the name and the bar
    name_width = rest * 3 // 4
    row = Text("  " + elide_middle(file.path, name_width - 1).ljust(name_width))
    row.append_text(progress_bar(file.done_bytes, file.size_bytes, rest - name_width))
    return row.append(f" {progress}".rstrip())


def rough_duration(s: float) -> str:
    """Return an estimated duration: 38 s, 12 min, 3 h."""
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 90 * 60 else f"{s / 3600:.0f} h"


def phase_line(task: LoadTask, phase: Phase, now: float, width: int) -> Text:
    """Return a phase's mark, name, duration and progress."""
    ended = phase.ended is not None
    failed = ended and phase is task.phases[-1] and (task.error or task.cancelled)
    duration = format_seconds((phase.ended if phase.ended is not None else now) - phase.began)
    row = Text().append(
        "✗ " if failed else "✓ " if ended else "▸ ",
        FAILED_STYLE if failed else DONE_STYLE if ended else ACTIVE_STYLE,
    )
    row.append(f"{phase.name:12}{duration:>9}", "" if ended else ACTIVE_STYLE)
    if phase.total:
        in_bytes = phase.name not in (DOWNLOAD, QUANTIZE)
        done, total = (
            (format_bytes(phase.done), format_bytes(phase.total)) if in_bytes else (phase.done, phase.total)
        )
        progress = f"{done} of {total}" + ("" if in_bytes else " parts")
        if not ended:
            row.append("  ").append_text(progress_bar(phase.done, phase.total, max(4, width - 26 - len(progress))))
            row.append(f" {progress}")
        elif not failed:
            row.append(f"  {total}" + ("" if in_bytes else " parts"), DIM_STYLE)
    elif ended and not failed and phase.name == DOWNLOAD and task.files:
        row.append(f"  {format_bytes(sum(file.size_bytes for file in task.files.values()))}, verified", DIM_STYLE)
    return row


def error_lines(error: Exception) -> Text:
    """Return the error's message and its remedy."""
    message, remedy = (error.message, error.remedy) if isinstance(error, LocalLLMError) else (str(error), None)
    lines = Text().append(one_line(message), FAILED_STYLE)
    return lines.append(f"\n{one_line(remedy)}") if remedy else lines


def progress_bar(done: int, total: int, width: int) -> Text:
    full = min(width, width * done // total) if total else width
    return Text("━" * full, ACTIVE_STYLE).append("─" * (width - full), DIM_STYLE)


def elide_middle(name: str, width: int) -> str:
    """Return the name in at most `width` characters, keeping its beginning and its end, which has the suffix."""
    name = one_line(name)
    if len(name) <= width:
        return name
    end = width // 4
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
