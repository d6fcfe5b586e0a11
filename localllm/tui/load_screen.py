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

from localllm.protocol.model import Model
from localllm.tui.load_page import render_load
from localllm.tui.machine import Machine
from localllm.tui.opening import DOWNLOAD, LoadTask

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
