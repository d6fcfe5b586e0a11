"""The app in a terminal: a model is made ready, then a conversation is held with it.

Knows the machine and its models by `Machine` alone.
"""

import asyncio
import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

from textual.app import App
from textual.binding import Binding
from textual.events import Key, Paste

from localllm.conversation.session import Session
from localllm.protocol.model import Model
from localllm.tui.chat_screen import ChatScreen
from localllm.tui.help_screen import key_name
from localllm.tui.load_screen import LoadScreen
from localllm.tui.machine import Machine
from localllm.tui.models_screen import FirstRunScreen
from localllm.tui.picker import ModelChosen
from localllm.tui.themes import apply_theme, use_ansi_colors

# Python's collector of garbage, kept from holding up keys: what there is when a conversation begins it need not
# go through again and again, which takes a tenth of a second, and all of what came since only now and then.
GC_THRESHOLDS: Final = (700, 10, 1000)  # the last is 10 as Python has it: all was gone through once a second


def freeze_garbage() -> None:
    """What is there now, once it holds no garbage; until `let_go`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def unfreeze_garbage() -> None:
    """What was left out may be garbage now, such as a model that is closed."""
    gc.unfreeze()


TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


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
        super().__init__(ansi_color=use_ansi_colors())
        self.machine = machine
        self.model_name = name
        self.start_session = begin
        self.home = home
        self.model: Model | None = None
        self.session: Session | None = None
        self.early_input: list[Key | Paste] = []  # what is typed before there is a prompt, which is for it
        self.error: Exception | None = None
        self.exit_signal: signal.Signals | None = None

    def on_mount(self) -> None:
        for number in TERMINATION_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.exit_on_signal, number)
        apply_theme(self, self.home)
        if self.model_name is None:
            self.choose_model()
        else:
            self.load_or_exit(self.model_name)

    def choose_model(self) -> None:
        self.push_screen(FirstRunScreen(self.machine), self.load_or_exit)

    def load_or_exit(self, name: str | None) -> None:
        """Make a model ready, and talk with it; None: nothing was wanted."""
        if name is None:
            self.exit(0)
            return
        before, self.model_name = self.model_name, name
        opening = LoadScreen(self.machine, name)

        def opened(model: Model | None) -> None:
            if model is not None:
                self.start_chat(model)
            elif before is None:
                self.model_name = None
                self.choose_model()
            elif before != name:  # the one so far has made room, and is wanted again
                self.load_or_exit(before)
            else:
                self.error = opening.load_task.error
                self.exit(return_code=1)

        self.push_screen(opening, opened)

    def on_key(self, event: Key) -> None:
        if not self.lacks_prompt:
            return
        if event.is_printable or event.key == "enter":
            self.early_input.append(Key(event.key, event.character))
        elif event.key == "backspace":
            del self.early_input[-1:]

    def on_paste(self, event: Paste) -> None:
        if self.lacks_prompt:
            self.early_input.append(Paste(event.text))

    @property
    def lacks_prompt(self) -> bool:
        """Is there nothing yet that what is typed could be for?"""
        return not self.screen.takes_answers if isinstance(self.screen, LoadScreen) else self.focused is None

    def get_key_display(self, binding: Binding) -> str:
        return key_name(super().get_key_display(binding))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A conversation has its own Ctrl-C."""
        return action != "back_out" or not isinstance(self.screen, ChatScreen)

    def action_back_out(self) -> None:
        """Ctrl-C in a list, a question or on the way to a model is Escape."""
        self.simulate_key("escape")

    def start_chat(self, model: Model) -> None:
        """Talk with a model: go on with the conversation, or begin one."""
        self.model = model
        freeze_garbage()
        try:
            if self.session:
                self.session.use_model(model)
            else:
                self.session = self.start_session(model)
            self.push_screen(ChatScreen(self.session, self.machine, self.early_input))
        except Exception as fault:  # told where the terminal is a plain one again
            self.error = fault
            self.exit(return_code=1)

    async def on_model_chosen(self, chosen: ModelChosen) -> None:
        """Another one goes on with the conversation. The one so far goes first, so that there is room."""
        if isinstance(self.screen, ChatScreen) and not self.screen.is_busy():
            await self.pop_screen()
            if self.model:
                self.model.close()
                self.model = None
            unfreeze_garbage()
            self.load_or_exit(chosen.name)

    def exit_on_signal(self, number: signal.Signals) -> None:
        self.exit_signal = number
        self.exit()

    def on_unmount(self) -> None:
        if self.model:
            self.model.close()
