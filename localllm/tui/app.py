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
from textual.events import Key, Paste

from localllm.conversation.session import Session
from localllm.model import Model
from localllm.tui.chat_screen import ChatScreen
from localllm.tui.first_run import FirstRunScreen
from localllm.tui.garbage import leave_out, let_go
from localllm.tui.keys import key_name
from localllm.tui.load_screen import LoadScreen
from localllm.tui.machine import Machine
from localllm.tui.themes import dress, native_colors
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
    BINDINGS: ClassVar = [
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        Binding("ctrl+c", "back_out", show=False, priority=True),
    ]

    def __init__(self, machine: Machine, name: str | None, begin: Callable[[Model], Session], home: Path):
        super().__init__(ansi_color=native_colors())
        self.machine = machine
        self.name_of_model = name
        self.begin = begin
        self.home = home
        self.model: Model | None = None
        self.session: Session | None = None
        self.early: list[Key | Paste] = []  # what is typed before there is a prompt, which is for it
        self.fault: Exception | None = None
        self.ended_by: signal.Signals | None = None

    def on_mount(self) -> None:
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.end_by, number)
        dress(self, self.home)
        if self.name_of_model is None:
            self.choose_first()
        else:
            self.open_or_leave(self.name_of_model)

    def choose_first(self) -> None:
        self.push_screen(FirstRunScreen(self.machine), self.open_or_leave)

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
            elif before is None:
                self.name_of_model = None
                self.choose_first()
            elif before != name:  # the one so far has made room, and is wanted again
                self.open_or_leave(before)
            else:
                self.fault = opening.opening.fault
                self.exit(return_code=1)

        self.push_screen(opening, opened)

    def on_key(self, event: Key) -> None:
        if not self.has_no_prompt:
            return
        if event.is_printable or event.key == "enter":
            self.early.append(Key(event.key, event.character))
        elif event.key == "backspace":
            del self.early[-1:]

    def on_paste(self, event: Paste) -> None:
        if self.has_no_prompt:
            self.early.append(Paste(event.text))

    @property
    def has_no_prompt(self) -> bool:
        """Is there nothing yet that what is typed could be for?"""
        return not self.screen.asks if isinstance(self.screen, LoadScreen) else self.focused is None

    def get_key_display(self, binding: Binding) -> str:
        return key_name(super().get_key_display(binding))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A conversation has its own Ctrl-C."""
        return action != "back_out" or not isinstance(self.screen, ChatScreen)

    def action_back_out(self) -> None:
        """Ctrl-C in a list, a question or on the way to a model is Escape."""
        self.simulate_key("escape")

    def hold(self, model: Model) -> None:
        """Talk with a model: go on with the conversation, or begin one."""
        self.model = model
        leave_out()
        try:
            if self.session:
                self.session.go_on_with(model)
            else:
                self.session = self.begin(model)
            self.push_screen(ChatScreen(self.session, self.machine, self.early))
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
