"""A model on its way: downloaded, quantized, loaded, or why not. Gives the model, or None to go back."""

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm.errors import LocalLLMError
from localllm.formatting import format_bytes, format_seconds, one_line
from localllm.protocol.model import Model
from localllm.tui.machine import Machine
from localllm.tui.offers import memory_and_speed, parameters_and_license
from localllm.tui.opening import DOWNLOAD, QUANTIZE, FileDownload, LoadTask, Phase

# What a person sees of a model on its way, as text of a given width. Knows how far it is, and no screen.

MAX_FILES = 6  # lines of a download, beside that for all
MAX_NOTES = 3
TOTAL_NAME = "in all"
DONE_STYLE, FAILED_STYLE, DIM_STYLE, ACTIVE_STYLE = "green", "red", "dim", "bold"


def render_load(task: LoadTask, now: float, width: int) -> Text:
    """now: by the clock of the opening, in seconds; width: in characters."""
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
    """What it is; of a download what it takes."""
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
        if said := memory_and_speed(offer):
            rows.append(Text(said, "" if offer.fits else FAILED_STYLE))
    return join_lines(rows)


def download_lines(task: LoadTask, now: float, width: int) -> Text:
    """A line for each file, verified ones last to go, and one for all."""
    files = list(task.files.values())
    verified = [file for file in files if file.verified]
    coming = [file for file in files if not file.verified]
    coming.sort(key=lambda file: file.began is None)
    shown = coming[:MAX_FILES]
    rows = [Text(f"✓ {files_summary(verified)} verified", DONE_STYLE)] if verified else []
    rows += [file_line(file, now, width) for file in shown]
    if len(coming) > len(shown):
        rows.append(Text(f"  {len(coming) - len(shown)} more wait", DIM_STYLE))
    if len(files) > 1:
        rows.append(file_line(total_download(files, task.here_bytes), now, width))
    return join_lines(rows)


def files_summary(files: list[FileDownload]) -> str:
    if len(files) == 1:
        return f"{one_line(files[0].path)}, {format_bytes(files[0].size_bytes)},"
    return f"{len(files)} files, {format_bytes(sum(file.size_bytes for file in files))},"


def total_download(files: list[FileDownload], here_bytes: int) -> FileDownload:
    begun = [file.began for file in files if file.began is not None]
    total, done = sum(file.size_bytes for file in files), sum(file.done_bytes for file in files)
    came = sum(file.received_bytes for file in files)
    return FileDownload(TOTAL_NAME, here_bytes + total, here_bytes + done, min(begun, default=None), came)


def file_line(file: FileDownload, now: float, width: int) -> Text:
    rate, left = file.rate(now), file.size_bytes - file.done_bytes
    speed = (
        f"{f'{format_bytes(rate)}/s':>9} {f'{rough_duration(left / rate)} left':>11}" if rate and left > 0 else ""
    )
    if left <= 0 and not file.verified and file.path != TOTAL_NAME:
        speed = "verifying"
    told = f"{format_bytes(file.done_bytes):>7} of {format_bytes(file.size_bytes):<7} {speed:<21}"
    rest = max(8, width - len(told) - 3)  # for a mark, the name and the bar
    name = rest * 3 // 4
    row = Text("  " + elide_middle(file.path, name - 1).ljust(name))
    row.append_text(progress_bar(file.done_bytes, file.size_bytes, rest - name))
    return row.append(f" {told}".rstrip())


def rough_duration(s: float) -> str:
    """Roughly, as nobody knows better: 38 s, 12 min, 3 h."""
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 90 * 60 else f"{s / 3600:.0f} h"


def phase_line(task: LoadTask, phase: Phase, now: float, width: int) -> Text:
    """Of a phase: a mark, its name, how long it takes, and how far it is."""
    over = phase.ended is not None
    broken = over and phase is task.phases[-1] and (task.error or task.cancelled)
    took = format_seconds((phase.ended if phase.ended is not None else now) - phase.began)
    row = Text().append(
        "✗ " if broken else "✓ " if over else "▸ ",
        FAILED_STYLE if broken else DONE_STYLE if over else ACTIVE_STYLE,
    )
    row.append(f"{phase.name:12}{took:>9}", "" if over else ACTIVE_STYLE)
    if phase.total:
        in_bytes = phase.name not in (DOWNLOAD, QUANTIZE)
        done, total = (
            (format_bytes(phase.done), format_bytes(phase.total)) if in_bytes else (phase.done, phase.total)
        )
        told = f"{done} of {total}" + ("" if in_bytes else " parts")
        if not over:
            row.append("  ").append_text(progress_bar(phase.done, phase.total, max(4, width - 26 - len(told))))
            row.append(f" {told}")
        elif not broken:
            row.append(f"  {total}" + ("" if in_bytes else " parts"), DIM_STYLE)
    elif over and not broken and phase.name == DOWNLOAD and task.files:
        row.append(f"  {format_bytes(sum(file.size_bytes for file in task.files.values()))}, verified", DIM_STYLE)
    return row


def error_lines(error: Exception) -> Text:
    """Its sentence, and what can be done."""
    message, remedy = (error.message, error.remedy) if isinstance(error, LocalLLMError) else (str(error), None)
    told = Text().append(one_line(message), FAILED_STYLE)
    return told.append(f"\n{one_line(remedy)}") if remedy else told


def progress_bar(done: int, total: int, width: int) -> Text:
    full = min(width, width * done // total) if total else width
    return Text("━" * full, ACTIVE_STYLE).append("─" * (width - full), DIM_STYLE)


def elide_middle(name: str, width: int) -> str:
    """With its beginning, which tells the parts of a model apart, and its end, which says what it is."""
    name = one_line(name)
    if len(name) <= width:
        return name
    end = width // 4
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"


FRAMES_PER_S = 20
MAX_COLUMNS, BORDER_COLUMNS = 100, 4  # characters, as in the style below
SHOW_AFTER_S = 0.3  # what is ready before needs no screen of its own

LOADING_KEYS = "Esc Cancel"
CONFIRM_STOP_KEYS = "Stop the download? What came is kept, and it goes on there the next time.   Y Stop   N Go on"
STOPPING_TEXT = "Stopping …"
FAILED_KEYS = "R Try again   Esc Back"


class LoadScreen(ModalScreen[Model | None]):
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
        Binding("n", "go_on", "Go on", show=False),
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
        """How far it is; once it is over, what became of it."""
        opening = self.load_task
        if not self.is_current:
            return
        if opening.finished and not opening.error:
            self.dismiss(opening.take())
            return
        self.confirming_stop = self.confirming_stop and self.is_downloading
        now = self.clock()
        if opening.error or now - opening.began >= SHOW_AFTER_S:
            self.remove_class("unseen")
        keys, told = self.key_hint, self.query_one("#load_page", Static)
        width = (
            told.size.width or min(MAX_COLUMNS, self.size.width * 9 // 10) - BORDER_COLUMNS
        )  # none before it is seen
        told.update(render_load(opening, now, width))
        self.query_one("#load_keys", Static).update(Text(keys))

    @property
    def key_hint(self) -> str:
        if self.load_task.error:
            return FAILED_KEYS
        if self.load_task.cancelled:
            return STOPPING_TEXT
        return CONFIRM_STOP_KEYS if self.confirming_stop else LOADING_KEYS

    @property
    def takes_answers(self) -> bool:
        """Are letters answers?"""
        return self.confirming_stop or self.load_task.error is not None

    @property
    def is_downloading(self) -> bool:
        return self.load_task.current_phase == DOWNLOAD and bool(self.load_task.files)

    def action_leave(self) -> None:
        """Back; while files come, only when that is meant."""
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
        """A download ends by itself within moments; what holds memory is waited for, so that the next model finds
        it free."""
        waits = not self.is_downloading
        self.load_task.cancel()
        if not waits:
            self.dismiss(None)

    def on_unmount(self) -> None:
        self.load_task.cancel()
