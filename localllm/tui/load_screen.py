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

from localllm.model import Model
from localllm.tui.load_page import page
from localllm.tui.machine import Machine
from localllm.tui.opening import DOWNLOAD, Opening

FRAMES_PER_S = 20
MOST_WIDTH, BORDERS = 100, 4  # characters, as in the style below
UNSEEN_S = 0.3  # what is ready before needs no screen of its own

ON_THE_WAY = "Esc Cancel"
ASKING = "Stop the download? What came is kept, and it goes on there the next time.   Y Stop   N Go on"
STOPPING = "Stopping …"
FAILED = "R Try again   Esc Back"


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
        self.name_of_model = name
        self.clock = clock
        self.opening = Opening(machine, name, clock)
        self.asking = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="load"):
            yield Static(id="load_page", markup=False)
            yield Static(id="load_keys", markup=False)

    def on_mount(self) -> None:
        self.set_interval(1 / FRAMES_PER_S, self.draw)

    def draw(self) -> None:
        """How far it is; once it is over, what became of it."""
        opening = self.opening
        if not self.is_current:
            return
        if opening.over and not opening.fault:
            self.dismiss(opening.take())
            return
        self.asking = self.asking and self.downloads
        now = self.clock()
        if opening.fault or now - opening.began >= UNSEEN_S:
            self.remove_class("unseen")
        keys, told = self.keys_now, self.query_one("#load_page", Static)
        width = told.size.width or min(MOST_WIDTH, self.size.width * 9 // 10) - BORDERS  # none before it is seen
        told.update(page(opening, now, width))
        self.query_one("#load_keys", Static).update(Text(keys))

    @property
    def keys_now(self) -> str:
        if self.opening.fault:
            return FAILED
        if self.opening.cancelled:
            return STOPPING
        return ASKING if self.asking else ON_THE_WAY

    @property
    def asks(self) -> bool:
        """Are letters answers?"""
        return self.asking or self.opening.fault is not None

    @property
    def downloads(self) -> bool:
        return self.opening.under_way == DOWNLOAD and bool(self.opening.files)

    def action_leave(self) -> None:
        """Back; while files come, only when that is meant."""
        if self.opening.fault:
            self.dismiss(None)
        elif self.downloads and not self.asking:
            self.asking = True
        elif self.asking:
            self.asking = False
        else:
            self.stop()

    def action_stop(self) -> None:
        if self.asking:
            self.stop()

    def action_go_on(self) -> None:
        self.asking = False

    def action_again(self) -> None:
        if self.opening.fault:
            self.opening = Opening(self.machine, self.name_of_model)

    def stop(self) -> None:
        """A download ends by itself within moments; what holds memory is waited for, so that the next model finds
        it free."""
        waits = not self.downloads
        self.opening.cancel()
        if not waits:
            self.dismiss(None)

    def on_unmount(self) -> None:
        self.opening.cancel()
