"""A conversation on the screen: what was said above, the prompt at the bottom, and what both do to it."""

import time
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer, Static

from localllm.conversation.chat import Events
from localllm.conversation.commands import execute, unquote
from localllm.conversation.session import Session
from localllm.conversation.turn import Turn
from localllm.errors import LocalLLMError, UsageError
from localllm.tui.answering import Answering, Watcher
from localllm.tui.dialogs import Ask, Confirm
from localllm.tui.prompt import Prompt
from localllm.tui.transcript.markdown import visible
from localllm.tui.transcript.saving import check_path, name_for, path_of, write_code
from localllm.tui.transcript.turn_view import TurnView
from localllm.tui.transcript.view import Transcript

FRAMES_PER_S = 30
LEAVE_S = 2.0  # within which a second Ctrl-C leaves
LAST_WORDS_S = 5.0  # that an answer is given to end, when the app is left


class ChatScreen(Screen[None]):
    BINDING_GROUP_TITLE = "Chat"
    BINDINGS: ClassVar = [
        Binding("escape", "back", "stop, back", key_display="esc"),
        Binding("tab", "app.focus_next", "turns"),
        Binding("ctrl+c", "interrupt", "copy, stop, clear, leave", show=False, priority=True),
        Binding("ctrl+d", "leave", "leave"),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
    ]
    DEFAULT_CSS = """
    ChatScreen {
        #head { height: 1; padding: 0 1; color: $text-muted; background: $boost; }
        #middle { height: 1fr; }
    }
    """

    def __init__(self, session: Session):
        super().__init__()
        self.session = session
        self.model = session.llm
        self.chat = session.chat
        self.answering: Answering | None = None
        self.question = ""  # of the answer under way, as it was typed
        self.transcript = Transcript(session.chat)
        self.prompt = Prompt(session.chats.parent / "history")
        self.watchers: list[Watcher] = [self.transcript]
        self.interrupted_at = -LEAVE_S

    def compose(self) -> ComposeResult:
        yield Static(self.title_line, id="head", markup=False)
        with Horizontal(id="middle"):
            yield self.transcript
        yield self.prompt
        yield Footer(compact=True, show_command_palette=False)

    @property
    def title_line(self) -> str:
        return visible(f"{self.model.name} · {self.model.device} · context {self.model.context:,}")

    def on_mount(self) -> None:
        self.set_interval(1 / FRAMES_PER_S, self.hand_over)
        self.prompt.focus()
        if not self.model.has_chat_template:
            self.say(f"{self.model.name} has no chat template: it continues the text of this conversation")

    def say(self, text: str, severity: str = "information") -> None:
        self.notify(visible(text), severity=severity, markup=False)  # pyright: ignore[reportArgumentType]

    # What was typed, and its answer

    def on_prompt_sent(self, sent: Prompt.Sent) -> None:
        if self.is_busy(sent.text):
            return
        if sent.text.startswith("/"):
            self.command(sent.text)
        elif text := unquote(sent.text):
            editing = self.session.editing
            self.answer(text, lambda: self.session.ask(text), editing.parent if editing else self.chat.at)

    def is_busy(self, typed: str = "") -> bool:
        """Is an answer under way? Says so, and what was typed stays where it was."""
        if self.answering:
            self.prompt.text = self.prompt.text or typed
            self.say("an answer is under way; Escape stops it")
        return self.answering is not None

    def command(self, line: str) -> None:
        """What begins with a slash."""
        at = self.chat.at
        try:
            done = execute(self.session, line)
        except EOFError:
            self.app.exit(0)
            return
        except LocalLLMError as error:
            self.prompt.text = line
            self.say(str(error), "error")
            return
        if self.chat.at is not at:
            self.transcript.show_branch()
        if done.text:
            self.transcript.tell(done.text)
        if done.draft is not None:
            self.prompt.text = done.draft
        if done.ask:  # /edit TEXT or /regenerate: something else in place of the newest turn
            words = line.split(maxsplit=1)[1:]
            self.answer(unquote(words[0]) if words else at.question, done.ask, at.parent)

    def answer(self, question: str, ask: Callable[[], Events], after: Turn | None) -> None:
        """Show the question and its answer as it comes; after: the turn that they follow."""
        self.question = question
        self.transcript.ask(question, after or self.chat.root)
        self.answering = Answering(lambda: self.kept(ask), self.chat.stop)
        for watcher in self.watchers:
            watcher.begin(self.answering.began)

    def kept(self, ask: Callable[[], Events]) -> Events:
        """The answer, which is kept where it ends: on its own thread, as a file may take its time."""
        try:
            yield from ask()
        finally:
            self.session.keep()

    def hand_over(self) -> None:
        """What came since the last frame, to those who show it."""
        if not self.answering:
            return
        came, ended = self.answering.take()
        for watcher in self.watchers if came else ():
            watcher.follow(came)
        if ended:
            self.answering = None
            for watcher in self.watchers:
                watcher.end(ended)
            if self.transcript.failed:
                self.prompt.text = self.prompt.text or self.question

    # Leaving, stopping

    def action_back(self) -> None:
        """Escape: out of what is innermost."""
        if self.answering:
            self.answering.stop()
        elif self.session.editing:
            self.session.editing, self.prompt.text = None, ""
        else:
            self.prompt.focus()

    def action_interrupt(self) -> None:
        """Ctrl-C: copy what is selected, else stop, else clear the line; a second one leaves."""
        selected = self.get_selected_text()
        if selected:
            self.copy(selected, "the selection is copied")
            self.clear_selection()
            return
        if self.answering and not self.answering.stopping:
            self.answering.stop()
        elif self.prompt.text:
            self.prompt.text = ""
            self.session.editing = None
        elif time.monotonic() - self.interrupted_at < LEAVE_S:
            self.app.exit(0)
        else:
            self.interrupted_at = time.monotonic()
            self.say("Ctrl-C again leaves, as Ctrl-D does")

    def action_leave(self) -> None:
        if not self.prompt.text:
            self.app.exit(0)

    def on_unmount(self) -> None:
        """What was said so far is kept, however the app is left."""
        if self.answering:
            self.answering.stop()
            self.answering.thread.join(LAST_WORDS_S)

    def action_page(self, step: int) -> None:
        (self.transcript.action_page_up if step < 0 else self.transcript.action_page_down)()

    # What is done to the chosen turn

    def chosen(self, *, may_wait: bool = False) -> TurnView | None:
        """The chosen turn, else the newest; None, and a word about it, where there is none to act on now."""
        if not may_wait and self.is_busy():
            return None
        view = self.transcript.chosen or (self.transcript.views[-1] if self.transcript.views else None)
        if view is None or view.turn is None:
            self.say("nothing has been said yet")
            return None
        return view

    def action_edit_turn(self) -> None:
        view = self.chosen()
        if view and view.turn:
            self.prompt.text = self.session.edit(view.turn)
            self.prompt.focus()
            self.say("Enter asks this instead, on a branch of its own; Escape leaves it as it was")

    def action_ask_again(self) -> None:
        view = self.chosen()
        if view and (turn := view.turn):
            self.answer(turn.question, lambda: self.chat.again(turn), turn.parent)

    def action_go_to_branch(self, step: int) -> None:
        view = self.chosen()
        if not view or not view.turn:
            return
        ways = view.turn.ways
        if len(ways) < 2:
            self.say("there is one branch here; e and r begin others")
            return
        turn = ways[(ways.index(view.turn) + step) % len(ways)]
        self.chat.switch(turn)
        self.transcript.show_branch(turn)
        self.keep()

    def action_undo(self) -> None:
        if not self.is_busy():
            self.command("/undo")

    def action_redo(self) -> None:
        if not self.is_busy():
            self.command("/redo")

    def keep(self) -> None:
        try:
            if told := self.session.keep():
                self.say(told)
        except UsageError as error:
            self.say(str(error), "error")

    def action_fold_thoughts(self) -> None:
        view = self.transcript.live or self.chosen(may_wait=True)
        if view:
            view.fold_thoughts()

    # Copying

    def copy(self, text: str, told: str) -> None:
        self.app.copy_to_clipboard(text)
        self.say(told)

    def action_copy_answer(self) -> None:
        view = self.chosen(may_wait=True)
        if view and view.turn:
            self.copy(visible(view.turn.answer), "the answer is copied")

    def action_copy_address(self, address: str) -> None:
        self.copy(visible(address), f"copied: {address}")

    def action_choose_code(self, step: int) -> None:
        view = self.chosen(may_wait=True)
        if view and not view.choose_code(step):
            self.say("there is no code in this answer")

    def action_copy_code(self, place: int | None = None) -> None:
        view = self.chosen(may_wait=True)
        code = view and view.choose_code(0, place)
        if code:
            self.copy(code.text, "the code is copied")
        elif view:
            self.say("there is no code in this answer")

    def action_save_code(self, place: int | None = None) -> None:
        view = self.chosen(may_wait=True)
        code = view and view.choose_code(0, place)
        if code:
            self.run_worker(self.save(code.text, name_for(code.piece.language)))
        elif view:
            self.say("there is no code in this answer")

    async def save(self, code: str, name: str) -> None:
        """Ask where to, and for leave where there is something already."""
        written = await self.app.push_screen_wait(Ask("Save the code as", name, check_path))
        if written is None:
            return
        path = path_of(written)
        if path.exists() and not await self.app.push_screen_wait(
            Confirm(f"{path} exists. Replace it?", "Replace")
        ):
            return
        try:
            write_code(path, code)
        except UsageError as error:
            self.say(str(error), "error")
        else:
            self.say(f"saved as {path}")
