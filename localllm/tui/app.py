"""The app in a terminal: a model is made ready, then a conversation is held with it.

Knows the machine and its models by `Machine` alone.
"""

from collections.abc import Callable
from pathlib import Path

from textual.app import App, ComposeResult
from textual.widgets import Static

from localllm.conversation.chat import Chat
from localllm.hub.pull import Order, RemoteFile, Show
from localllm.model import Model
from localllm.tui.chat_screen import ChatScreen
from localllm.tui.machine import Machine, Offer


class Unwatched:
    """A `Watch` that shows nothing."""

    def __init__(self) -> None:
        self.pull: Show = self

    def about(self, offer: Offer) -> None: ...
    def phase(self, name: str) -> None: ...
    def part(self, done: int, total: int) -> None: ...
    def note(self, text: str) -> None: ...
    def begin(self, order: Order) -> None: ...
    def advance(self, file: RemoteFile, count: int) -> None: ...
    def finish(self, file: RemoteFile) -> None: ...
    def say(self, text: str) -> None: ...


class ChatApp(App[int]):
    """begin: the conversation with a model that has become ready; home: where history and chats are kept.

    Gives its exit code; `fault` is what kept it from a conversation, for the terminal that it leaves.
    """

    TITLE = "localllm"
    CSS_PATH = "style.tcss"

    def __init__(self, machine: Machine, name: str, begin: Callable[[Model], Chat], home: Path):
        super().__init__()
        self.machine = machine
        self.name_of_model = name
        self.begin = begin
        self.home = home
        self.model: Model | None = None
        self.fault: Exception | None = None

    def compose(self) -> ComposeResult:
        yield Static(f"loading {self.name_of_model} …", id="loading", markup=False)

    def on_mount(self) -> None:
        self.run_worker(self.load, thread=True)

    def load(self) -> None:
        try:
            model = self.machine.open(self.name_of_model, Unwatched())
        except Exception as fault:  # told where the terminal is a plain one again
            self.fault = fault
            self.call_from_thread(self.exit, 1)
            return
        self.call_from_thread(self.ready, model)

    def ready(self, model: Model) -> None:
        self.model = model
        self.push_screen(ChatScreen(model, self.begin(model), self.home))

    def on_unmount(self) -> None:
        if self.model:
            self.model.close()
