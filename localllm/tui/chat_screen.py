"""The chat screen: the transcript, the metrics below it, and the prompt at the bottom."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.events import Key, Paste
from textual.highlight import highlight
from textual.widgets import Footer, Static

from localllm.conversation.chat import AnswerEvents, Turn
from localllm.conversation.commands import command_help, execute, strip_triple_quotes
from localllm.conversation.session import Session
from localllm.errors import LocalLLMError, UsageError
from localllm.formatting import printable
from localllm.tui.answer_thread import AnswerObserver, AnswerThread
from localllm.tui.inspector.panel import Inspector
from localllm.tui.machine import Machine
from localllm.tui.metrics_strip import MetricsStrip
from localllm.tui.picker import CommandChosen, SessionChosen
from localllm.tui.prompt import Prompt
from localllm.tui.transcript.view import Transcript
from localllm.tui.turn_screen import TurnScreen

FRAMES_PER_S = 30
SPLIT_MIN_COLUMNS = 110  # the inspector is beside the conversation from this width on, otherwise in its place
DOUBLE_INTERRUPT_S = 2.0  # a second Ctrl-C within this time exits
STOP_TIMEOUT_S = 5.0  # for an answer to end when the app exits
MAX_RATE_ATTEMPTS = 3  # measurements of the machine's bandwidth, which fail while other programs keep it busy


class ChatScreen(TurnScreen):
    """Sends messages and commands, and shows answers as they arrive."""

    BINDING_GROUP_TITLE = "Chat"
    BINDINGS: ClassVar = [
        Binding("tab", "app.focus_next", "Turns"),
        Binding("escape", "back", "Stop, back", show=False),
        Binding("ctrl+c", "interrupt", "Copy, stop, clear, leave", show=False, priority=True),
        Binding("ctrl+d", "leave", "Leave", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
    ]
    DEFAULT_CSS = """
    ChatScreen {
        #head { height: 1; padding: 0 1; color: $text-muted; }
        #middle { height: 1fr; }
        Transcript { width: 1fr; }
        Inspector { border-left: solid $panel; }
        &.-narrow Inspector { border-left: none; }
        &.-narrow.-inspecting Transcript { display: none; }
    }
    """

    def __init__(self, session: Session, machine: Machine, early_input: list[Key | Paste]):
        """early_input: keys and pastes from before the prompt existed; the screen empties the list"""
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (SPLIT_MIN_COLUMNS, "-wide")]
        self.early_input = early_input
        self.session, self.machine = session, machine
        self.model, self.chat = session.llm, session.chat
        self.answer_thread: AnswerThread | None = None
        self.question = ""  # of the answer under way, as typed
        self.save_message = ""  # a notice from saving the answer
        self.transcript = Transcript(self.chat)
        self.inspector = Inspector(self.model)
        self.strip = MetricsStrip(self.model)
        self.prompt = Prompt(session.folder.parent / "history", command_help())
        self.panels = Horizontal(self.transcript, self.inspector, id="middle")
        self.observers: list[AnswerObserver] = [self.transcript, self.inspector, self.strip]
        self.interrupted_at = -DOUBLE_INTERRUPT_S
        self.rate_attempts = 0

    def compose(self) -> ComposeResult:
        head = printable(f"{self.model.name} · {self.model.device} · context {self.model.context:,}")
        yield Static(head, id="head", markup=False)
        yield self.panels
        yield self.strip
        yield self.prompt
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.set_interval(1 / FRAMES_PER_S, self.deliver_events)
        self.set_focus(self.prompt.editor)
        while self.early_input:
            self.prompt.editor.post_message(self.early_input.pop(0))
        # Loads pygments now, so that the first code block does not wait 0.1 s for it.
        self.run_worker(lambda: highlight("x = 1", language="python"), thread=True)
        if not self.model.has_chat_template:
            self.say(f"{self.model.name} has no chat template: it continues the text of this conversation")

        self.call_later(self.measure_rates)

    def measure_rates(self) -> None:
        """Measure the machine's bandwidth for the roofline on a thread, while no answer is under way."""
        is_known = self.model.reads.bandwidth is not None
        if is_known or self.answer_thread or self.rate_attempts >= MAX_RATE_ATTEMPTS:
            return
        self.rate_attempts += 1

        def measure() -> None:
            with suppress(LocalLLMError):  # the model was closed meanwhile
                self.model.measure_rates()
                self.app.call_from_thread(self.strip.update_reads)

        self.run_worker(measure, thread=True)

    # Messages and answers

    def on_prompt_sent(self, sent: Prompt.Sent) -> None:
        if sent.text.startswith("/"):
            self.run_command(sent.text)
        elif self.is_busy():
            self.prompt.text = sent.text
        elif text := strip_triple_quotes(sent.text):
            editing = self.session.editing
            self.start_answer(
                text, lambda: self.session.ask(text), editing.parent if editing else self.chat.current
            )

    def on_prompt_help_wanted(self) -> None:
        self.action_help()

    def is_busy(self) -> bool:
        """Return whether an answer is under way, and notify the user if so."""
        if self.answer_thread:
            self.say("an answer is under way; Escape stops it")
        return self.answer_thread is not None

    def run_command(self, line: str) -> None:
        """Run a slash command. A rejected one leaves the prompt too; arrow up brings it back."""
        if line.split()[:1] in (["/help"], ["/?"]):
            self.action_help()
            return
        if self.is_busy():
            self.prompt.text = line
            return
        current = self.chat.current
        try:
            result = execute(self.session, line)
        except EOFError:
            self.app.exit(0)
            return
        except LocalLLMError as error:
            self.say(str(error), "error")
            return
        if self.chat.current is not current:
            self.transcript.show_branch()
        if result.text:
            self.transcript.show_message(result.text)
        if result.edit_text is not None:
            self.prompt.edit(result.edit_text)
        if result.start_answer:  # /edit TEXT or /regenerate: an alternative to the current turn
            arguments = line.split(maxsplit=1)[1:]
            question = strip_triple_quotes(arguments[0]) if arguments else current.question
            self.start_answer(question, result.start_answer, current.parent)

    def on_command_chosen(self, chosen: CommandChosen) -> None:
        self.prompt.focus()
        if chosen.is_complete:
            self.run_command(chosen.line)
        else:
            self.prompt.text = f"{chosen.line} "

    def on_session_chosen(self, chosen: SessionChosen) -> None:
        if self.is_busy():
            return
        try:
            self.session.load(chosen.id)
        except UsageError as error:
            self.say(str(error), "error")
        self.transcript.show_branch()

    def start_answer(self, question: str, ask: Callable[[], AnswerEvents], after: Turn | None) -> None:
        """Show a question, and its answer as it arrives. after: the preceding turn, None for the root"""
        self.question = question
        self.chat.inspect = self.inspector.inspect
        self.transcript.show_question(question, after or self.chat.root)
        self.prompt.busy = True
        self.answer_thread = AnswerThread(lambda: self.ask_and_save(ask), self.chat.stop)
        for observer in self.observers:
            observer.begin(self.answer_thread.began)

    def ask_and_save(self, ask: Callable[[], AnswerEvents]) -> AnswerEvents:
        """Yield the answer, and save the conversation at its end, on the answer's thread since writing may be
        slow.
        """
        try:
            yield from ask()
        finally:
            self.save_message = self.session.save()

    def deliver_events(self) -> None:
        """Pass the events since the last frame to the observers."""
        if not self.answer_thread:
            return
        events, outcome = self.answer_thread.drain()
        for observer in self.observers if events else ():
            observer.follow(events)
        if outcome:
            self.answer_thread = None
            for observer in self.observers:
                observer.end(outcome)
            if self.transcript.failed:
                self.prompt.text = self.prompt.text or self.question
            if self.save_message:
                self.say(self.save_message, "warning")
                self.save_message = ""
            self.prompt.busy = False
            self.call_later(self.measure_rates)

    # Panels, stopping, leaving

    async def action_inspector(self) -> None:
        """Open the inspector, or close it."""
        await self.close_settings()
        self.toggle_inspector()

    def toggle_inspector(self) -> None:
        """Open or close the inspector; the prompt keeps the focus, and Tab moves it into the inspector."""
        self.inspector.toggle()
        self.set_class(self.inspector.display, "-inspecting")
        self.set_focus(self.prompt.editor)

    async def action_settings(self) -> None:
        if self.inspector.display:
            self.toggle_inspector()
        await super().action_settings()

    async def action_back(self) -> None:
        """Stop the answer, or leave the innermost mode or panel."""
        if self.answer_thread:
            self.answer_thread.stop()
        elif self.session.editing:
            self.session.editing, self.prompt.text = None, ""
        elif not await self.close_settings():
            if self.inspector.display and not self.transcript.has_focus:
                self.toggle_inspector()
            self.prompt.focus()

    def action_interrupt(self) -> None:
        """Copy the selection, otherwise stop the answer, otherwise clear the prompt; a second Ctrl-C exits."""
        if selected := self.get_selected_text():
            self.copy(selected, "selection copied")
            self.clear_selection()
        elif self.answer_thread and not self.answer_thread.stopping:
            self.answer_thread.stop()
        elif self.prompt.text:
            self.prompt.text = ""
            self.session.editing = None
        elif time.monotonic() - self.interrupted_at < DOUBLE_INTERRUPT_S:
            self.app.exit(0)
        else:
            self.interrupted_at = time.monotonic()
            self.say("press Ctrl-C again to exit, or Ctrl-D", timeout_s=DOUBLE_INTERRUPT_S)

    def action_leave(self) -> None:
        if not self.prompt.text:
            self.app.exit(0)

    def action_page(self, step: int) -> None:
        (self.transcript.action_page_up if step < 0 else self.transcript.action_page_down)()

    def on_unmount(self) -> None:
        """Stop the answer and save its text so far, however the app exits."""
        if self.answer_thread:
            self.answer_thread.stop_and_join(STOP_TIMEOUT_S)
