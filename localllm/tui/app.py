"""The app in a terminal: a model is made ready, then a conversation is held with it.

Knows the machine and its models by `Machine` alone.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import ClassVar

from textual.app import App
from textual.binding import Binding

from localllm.conversation.session import Session
from localllm.model import Model
from localllm.tui.chat_screen import ChatScreen
from localllm.tui.load_screen import LoadScreen
from localllm.tui.machine import Machine

ENDING = (signal.SIGTERM, signal.SIGHUP)


class ChatApp(App[int]):
    """begin: the conversation with a model that has become ready.

    `fault` is what kept it from a conversation, and `ended_by` the signal that ended it: both are for whoever has
    the terminal after it.
    """

    TITLE = "localllm"
    CSS_PATH = "style.tcss"
    BINDINGS: ClassVar = [Binding("ctrl+z", "suspend_process", show=False, priority=True)]

    def __init__(self, machine: Machine, name: str, begin: Callable[[Model], Session]):
        super().__init__()
        self.machine = machine
        self.name_of_model = name
        self.begin = begin
        self.model: Model | None = None
        self.fault: Exception | None = None
        self.ended_by: signal.Signals | None = None

    def on_mount(self) -> None:
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.end_by, number)
        opening = LoadScreen(self.machine, self.name_of_model)

        def opened(model: Model | None) -> None:
            if model is None:
                self.fault = opening.opening.fault
                self.exit(return_code=1)
            else:
                self.hold(model)

        self.push_screen(opening, opened)

    def hold(self, model: Model) -> None:
        """Begin to talk with a model."""
        self.model = model
        try:
            self.push_screen(ChatScreen(self.begin(model)))
        except Exception as fault:  # told where the terminal is a plain one again
            self.fault = fault
            self.exit(return_code=1)

    def end_by(self, number: signal.Signals) -> None:
        self.ended_by = number
        self.exit()

    def on_unmount(self) -> None:
        if self.model:
            self.model.close()
