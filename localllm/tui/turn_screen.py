"""What is done to a turn that was chosen: asked otherwise, answered again, left for another, copied, saved."""

from collections.abc import Callable
from pathlib import Path

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from localllm.conversation.chat import AnswerEvents, Chat
from localllm.conversation.turn import Turn
from localllm.errors import UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import printable
from localllm.tui.dialogs import Confirm, LineInput
from localllm.tui.panel_screen import PanelScreen
from localllm.tui.prompt import Prompt
from localllm.tui.transcript.turn_view import TurnView
from localllm.tui.transcript.view import Transcript

# Where a block of code is to be saved.
TEXT_SUFFIX = ".txt"


def code_file_name(language: str) -> str:
    """A file's name as the language has it; language: as the model named it."""
    try:
        patterns = get_lexer_by_name(language).filenames
    except ClassNotFound:
        return "code" + TEXT_SUFFIX
    ending = Path(patterns[0]).suffix if patterns else ""
    return "code" + (ending if ending.removeprefix(".").isalnum() else TEXT_SUFFIX)


def code_file_path(written: str) -> Path:
    """Raises UsageError for what is no place for a file."""
    path = expand_path(written.strip())
    try:
        if path.is_dir():  # also no name at all: the folder that one is in
            raise UsageError(f"{path} is a folder", "name a file")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", "make it first")
    except OSError as error:
        raise UsageError(f"{path} cannot be looked for: {error.strerror}", "name another file") from error
    return path


class TurnScreen(PanelScreen):
    """Who inherits asks, and does commands."""

    chat: Chat
    transcript: Transcript
    prompt: Prompt

    def start_answer(self, question: str, ask: Callable[[], AnswerEvents], after: Turn | None) -> None:
        raise NotImplementedError

    def run_command(self, line: str) -> None:
        raise NotImplementedError

    def is_busy(self) -> bool:
        raise NotImplementedError

    def say(self, text: str, severity: str = "information") -> None:
        """A word that goes by itself."""
        self.notify(printable(text), severity=severity, markup=False)  # pyright: ignore[reportArgumentType]

    def selected_view(self, *, while_busy: bool = False) -> TurnView | None:
        """The chosen turn, else the newest; None, and a word about it, where there is none to act on now."""
        if not while_busy and self.is_busy():
            return None
        view = self.transcript.selected or (self.transcript.views[-1] if self.transcript.views else None)
        if view is None or view.turn is None:
            self.say("nothing has been said yet")
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
        ways = view.turn.siblings
        if len(ways) < 2:
            self.say("there is one branch here; e and r begin others")
            return
        turn = ways[(ways.index(view.turn) + step) % len(ways)]
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
            if told := self.session.save():
                self.say(told)
        except UsageError as error:
            self.say(str(error), "error")

    def action_fold_thoughts(self) -> None:
        view = self.transcript.live or self.selected_view(while_busy=True)
        if view:
            view.fold_thoughts()

    # Copying

    def copy(self, text: str, message: str) -> None:
        self.app.copy_to_clipboard(text)
        self.say(message)

    def action_copy_answer(self) -> None:
        view = self.selected_view(while_busy=True)
        if view and view.turn:
            self.copy(printable(view.turn.answer), "the answer is copied")

    def action_copy_address(self, address: str) -> None:
        self.copy(printable(address), f"copied: {address}")

    def action_choose_code(self, step: int) -> None:
        view = self.selected_view(while_busy=True)
        if view and not view.select_code(step):
            self.say("there is no code in this answer")

    def action_copy_code(self, place: int | None = None) -> None:
        view = self.selected_view(while_busy=True)
        code = view and view.select_code(0, place)
        if code:
            self.copy(code.text, "the code is copied")
        elif view:
            self.say("there is no code in this answer")

    def action_save_code(self, place: int | None = None) -> None:
        view = self.selected_view(while_busy=True)
        code = view and view.select_code(0, place)
        if code:
            self.run_worker(self.save_code(code.text, code_file_name(code.piece.language)))
        elif view:
            self.say("there is no code in this answer")

    async def save_code(self, code: str, name: str) -> None:
        """Ask where to, and for leave where there is something already."""
        written = await self.app.push_screen_wait(LineInput("Save the code as", name, code_file_path))
        if written is None:
            return
        text = f"{code}\n"
        try:
            path = code_file_path(written)
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
