"""The parts of the chat screen that open other screens, and that act on a turn: edit, regenerate, copy, save."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from localllm.conversation.chat import AnswerEvents, Chat, Turn
from localllm.conversation.session import Session
from localllm.conversation.sessions import SessionStore
from localllm.errors import UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import printable
from localllm.tui.dialogs import Confirm, LineInput
from localllm.tui.help_screen import HelpScreen
from localllm.tui.machine import Machine
from localllm.tui.models_screen import ModelsScreen
from localllm.tui.palette import ActionProvider, CommandProvider, ModelProvider, SessionProvider, ThemeProvider
from localllm.tui.picker import ModelChosen, SessionChosen
from localllm.tui.prompt import Prompt
from localllm.tui.sessions_screen import SessionsScreen
from localllm.tui.settings_panel import SettingsPanel
from localllm.tui.transcript.turn_view import TurnView
from localllm.tui.transcript.view import Transcript

TEXT_SUFFIX = ".txt"


class PanelScreen(Screen[None]):
    """Opens help, models and saved conversations, and settings beside the conversation.

    Subclasses lay out `panels`, implement `action_inspector`, and handle the messages of `picker.py`.
    """

    COMMANDS: ClassVar = {ActionProvider, CommandProvider, ModelProvider, SessionProvider, ThemeProvider}
    BINDING_GROUP_TITLE = "Conversation"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help"),
        Binding("f2", "settings", "Settings"),
        Binding("f3", "inspector", "Inspector"),
        Binding("f4", "models", "Models"),
        Binding("f5", "sessions", "Conversations"),
    ]

    machine: Machine
    session: Session
    panels: Widget  # contains the conversation, and settings once they are opened
    previous_focus: Widget | None = None  # before settings were opened

    @property
    def session_store(self) -> SessionStore:
        return self.session.store

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    async def action_settings(self) -> None:
        """Open the settings beside the conversation, or close them."""
        if not await self.close_settings():
            self.previous_focus = self.focused
            panel = SettingsPanel(self.session.chat)
            await self.panels.mount(panel)
            self.set_focus(panel.first_field)

    async def close_settings(self) -> bool:
        """Close the settings; return whether they were open."""
        panels = self.query(SettingsPanel)
        is_open = bool(panels)
        with self.app.batch_update():  # widgets that end have lost the styles that drawing them asks for
            await panels.remove()
        if is_open and self.previous_focus and self.previous_focus.is_attached:
            self.set_focus(self.previous_focus)
        return is_open

    def action_models(self) -> None:
        self.app.push_screen(ModelsScreen(self.machine), self._post_choice(ModelChosen))

    def action_sessions(self) -> None:
        self.app.push_screen(SessionsScreen(self.session_store), self._post_choice(SessionChosen))

    def _post_choice(self, make_message: Callable[[str], Message]) -> Callable[[str | None], None]:
        def post(name: str | None) -> None:
            if name is not None:
                self.post_message(make_message(name))

        return post


class TurnScreen(PanelScreen):
    """Acts on the selected turn, otherwise on the newest one. Subclasses start answers and run commands."""

    chat: Chat
    transcript: Transcript
    prompt: Prompt

    def start_answer(self, question: str, ask: Callable[[], AnswerEvents], after: Turn | None) -> None:
        raise NotImplementedError

    def run_command(self, line: str) -> None:
        raise NotImplementedError

    def is_busy(self) -> bool:
        raise NotImplementedError

    def say(self, text: str, severity: str = "information", *, timeout_s: float | None = None) -> None:
        """Show a notification. timeout_s: None for the usual time"""
        self.notify(printable(text), severity=severity, timeout=timeout_s, markup=False)  # pyright: ignore[reportArgumentType]

    def selected_view(self, *, while_busy: bool = False) -> TurnView | None:
        """Return the selected turn, otherwise the newest; None, with a notification, if there is none."""
        if not while_busy and self.is_busy():
            return None
        view = self.transcript.selected or (self.transcript.views[-1] if self.transcript.views else None)
        if view is None or view.turn is None:
            self.say("the conversation is empty")
            return None
        return view

    def action_edit_turn(self) -> None:
        view = self.selected_view()
        if view and view.turn:
            self.prompt.edit(self.session.edit(view.turn))
            self.prompt.focus()

    def action_ask_again(self) -> None:
        view = self.selected_view()
        if view and (turn := view.turn):
            self.start_answer(turn.question, lambda: self.chat.regenerate(turn), turn.parent)

    def action_go_to_branch(self, step: int) -> None:
        view = self.selected_view()
        if not view or not view.turn:
            return
        siblings = view.turn.siblings
        if len(siblings) < 2:
            self.say("there is only one branch here; e and r begin others")
            return
        turn = siblings[(siblings.index(view.turn) + step) % len(siblings)]
        self.chat.switch_to(turn)
        self.transcript.show_branch(turn)
        self.save_session()

    def action_undo(self) -> None:
        if not self.is_busy():
            self.run_command("/undo")

    def action_redo(self) -> None:
        if not self.is_busy():
            self.run_command("/redo")

    def save_session(self) -> None:
        try:
            if notice := self.session.save():
                self.say(notice)
        except UsageError as error:
            self.say(str(error), "error")

    def action_fold_thoughts(self) -> None:
        view = self.transcript.live or self.selected_view(while_busy=True)
        if view:
            view.fold_thoughts()

    def action_unfold(self) -> None:
        view = self.transcript.live or self.selected_view(while_busy=True)
        if view:
            view.fold()

    # Copying

    def copy(self, text: str, message: str) -> None:
        self.app.copy_to_clipboard(text)
        self.say(message)

    def action_copy_answer(self) -> None:
        view = self.selected_view(while_busy=True)
        if view and view.turn:
            self.copy(printable(view.turn.answer), "answer copied")

    def action_copy_address(self, address: str) -> None:
        self.copy(printable(address), f"copied: {address}")

    def action_choose_code(self, step: int) -> None:
        view = self.selected_view(while_busy=True)
        if view and not view.select_code(step):
            self.say("there is no code in this answer")

    def action_copy_code(self, index: int | None = None) -> None:
        view = self.selected_view(while_busy=True)
        code = view and view.select_code(0, index)
        if code:
            self.copy(code.text, "code copied")
        elif view:
            self.say("there is no code in this answer")

    def action_save_code(self, index: int | None = None) -> None:
        view = self.selected_view(while_busy=True)
        code = view and view.select_code(0, index)
        if code:
            self.run_worker(self.save_code(code.text, code_file_name(code.piece.language)))
        elif view:
            self.say("there is no code in this answer")

    async def save_code(self, code: str, name: str) -> None:
        """Ask for the file name, and before overwriting a file."""
        file_name = await self.app.push_screen_wait(LineInput("Save the code as", name, code_file_path))
        if file_name is None:
            return
        text = f"{code}\n"
        try:
            path = code_file_path(file_name)
            try:
                write_user_file(path, text, overwrite=False)
            except FileExistsError:
                question = printable(f"{path} exists. Replace it?")
                if not await self.app.push_screen_wait(Confirm(question, "Replace")):
                    return
                write_user_file(path, text, overwrite=True)
        except UsageError as error:
            self.say(str(error), "error")
        else:
            self.say(f"saved as {path}")


def code_file_path(text: str) -> Path:
    """Return the path that the user has typed. Raises UsageError if no file can be written there."""
    path = expand_path(text.strip())
    try:
        if path.is_dir():  # also for an empty text, which is the working folder
            raise UsageError(f"{path} is a folder", "name a file")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", "create it first")
    except OSError as error:
        raise UsageError(f"{path} cannot be accessed: {error.strerror}", "use another file") from error
    return path


def code_file_name(language: str) -> str:
    """Return a file name with the usual suffix of a language, as named by the model."""
    try:
        patterns = get_lexer_by_name(language).filenames
    except ClassNotFound:
        return "code" + TEXT_SUFFIX
    ending = Path(patterns[0]).suffix if patterns else ""
    return "code" + (ending if ending.removeprefix(".").isalnum() else TEXT_SUFFIX)
