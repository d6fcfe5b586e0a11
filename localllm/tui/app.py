"""The app in a terminal: a model is made ready, then a conversation is held with it.

Knows the machine and its models by `Machine` alone.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding

from localllm.conversation.session import Session
from localllm.model import Model
from localllm.tui.chat_screen import ChatScreen
from localllm.tui.first_run import FirstRunScreen
from localllm.tui.garbage import leave_out, let_go
from localllm.tui.load_screen import LoadScreen
from localllm.tui.machine import Machine
from localllm.tui.themes import dress
from localllm.tui.wishes import ModelChosen

ENDING = (signal.SIGTERM, signal.SIGHUP)


class ChatApp(App[int]):
    """name: of a model, None to choose one; begin: the conversation with one that has become ready; home: where
    the theme is kept.

    `fault` is what kept it from a conversation, and `ended_by` the signal that ended it: both are for whoever has
    the terminal after it.
    """

    TITLE = "localllm"
    CSS_PATH = "style.tcss"
    BINDINGS: ClassVar = [Binding("ctrl+z", "suspend_process", show=False, priority=True)]

    def __init__(self, machine: Machine, name: str | None, begin: Callable[[Model], Session], home: Path):
        super().__init__()
        self.machine = machine
        self.name_of_model = name
        self.begin = begin
        self.home = home
        self.model: Model | None = None
        self.session: Session | None = None
        self.fault: Exception | None = None
        self.ended_by: signal.Signals | None = None

    def on_mount(self) -> None:
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.end_by, number)
        dress(self, self.home)
        if self.name_of_model is None:
            self.push_screen(FirstRunScreen(self.machine), self.open_or_leave)
        else:
            self.open_or_leave(self.name_of_model)

    def open_or_leave(self, name: str | None) -> None:
        """Make a model ready, and talk with it; None: nothing was wanted."""
        if name is None:
            self.exit(0)
            return
        before, self.name_of_model = self.name_of_model, name
        opening = LoadScreen(self.machine, name)

        def opened(model: Model | None) -> None:
            if model is not None:
                self.hold(model)
            elif before is not None and before != name:  # the one so far has made room, and is wanted again
                self.open_or_leave(before)
            else:
                self.fault = opening.opening.fault
                self.exit(return_code=1)

        self.push_screen(opening, opened)

    def hold(self, model: Model) -> None:
        """Talk with a model: go on with the conversation, or begin one."""
        self.model = model
        leave_out()
        try:
            if self.session:
                self.session.go_on_with(model)
            else:
                self.session = self.begin(model)
            self.push_screen(ChatScreen(self.session, self.machine))
        except Exception as fault:  # told where the terminal is a plain one again
            self.fault = fault
            self.exit(return_code=1)

    async def on_model_chosen(self, chosen: ModelChosen) -> None:
        """Another one goes on with the conversation. The one so far goes first, so that there is room."""
        if isinstance(self.screen, ChatScreen) and not self.screen.is_busy():
            await self.pop_screen()
            if self.model:
                self.model.close()
                self.model = None
            let_go()
            self.open_or_leave(chosen.name)

    def end_by(self, number: signal.Signals) -> None:
        self.ended_by = number
        self.exit()

    def on_unmount(self) -> None:
        if self.model:
            self.model.close()
