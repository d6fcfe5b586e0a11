"""The chat app: loads a model, then shows the conversation with it. It reaches models through `Machine` only."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding
from textual.events import Key, Paste

from localllm.conversation.model import Model
from localllm.conversation.session import Session
from localllm.llm.garbage import freeze_garbage, unfreeze_garbage
from localllm.tui.chat_screen import ChatScreen
from localllm.tui.help_screen import key_name
from localllm.tui.load_screen import LoadScreen
from localllm.tui.machine import Machine
from localllm.tui.models_screen import FirstRunScreen
from localllm.tui.picker import ModelChosen
from localllm.tui.themes import apply_theme, use_ansi_colors

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class ChatApp(App[int]):
    """The app of `localllm run`. After it has ended, `error` is why no conversation began, and `exit_signal` the
    signal that ended it.
    """

    TITLE = "localllm"
    CSS_PATH = "style.tcss"
    BINDINGS: ClassVar = [
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        Binding("ctrl+c", "back_out", show=False, priority=True),
    ]

    def __init__(self, machine: Machine, name: str | None, begin: Callable[[Model], Session], home: Path):
        """name: the model, None to let the user choose one; begin: returns the session with a loaded model; home:
        folder of the theme file
        """
        super().__init__(ansi_color=use_ansi_colors())
        self.machine = machine
        self.model_name = name
        self.start_session = begin
        self.home = home
        self.model: Model | None = None
        self.session: Session | None = None
        self.early_input: list[Key | Paste] = []  # typed while the model loads; passed on to the prompt
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
        """Load a model and start the chat; None exits."""
        if name is None:
            self.exit(0)
            return
        previous_name, self.model_name = self.model_name, name
        screen = LoadScreen(self.machine, name)

        def opened(model: Model | None) -> None:
            if model is not None:
                self.start_chat(model)
            elif previous_name is None:
                self.model_name = None
                self.choose_model()
            elif previous_name != name:  # go back to the model that was closed to free its memory
                self.model_name = previous_name  # so that its failure, too, exits
                self.load_or_exit(previous_name)
            else:
                self.error = screen.load_task.error
                self.exit(return_code=1)

        self.push_screen(screen, opened)

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
        """Whether typed text has no destination yet, because the model is still loading."""
        return not self.screen.takes_answers if isinstance(self.screen, LoadScreen) else self.focused is None

    def get_key_display(self, binding: Binding) -> str:
        return key_name(super().get_key_display(binding))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave Ctrl-C to the chat screen, which has its own action, and open the palette only there: elsewhere it
        would contain Textual's own commands only.
        """
        if action == "command_palette":
            return isinstance(self.screen, ChatScreen)
        return action != "back_out" or not isinstance(self.screen, ChatScreen)

    def action_back_out(self) -> None:
        """Treat Ctrl-C as Escape in lists, dialogs and while loading."""
        self.simulate_key("escape")

    def start_chat(self, model: Model) -> None:
        """Continue the conversation with this model, or begin one."""
        self.model = model
        freeze_garbage()
        try:
            if self.session:
                self.session.use_model(model)
            else:
                self.session = self.start_session(model)
            self.push_screen(ChatScreen(self.session, self.machine, self.early_input))
        except Exception as error:  # reported after the terminal is restored
            self.error = error
            self.exit(return_code=1)

    async def on_model_chosen(self, chosen: ModelChosen) -> None:
        """Continue the conversation with another model. The current one is closed first, to free its memory."""
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
