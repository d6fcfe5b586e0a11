"""A conversation on the screen: what was said above, the numbers below it, the prompt at the bottom."""

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.events import Key, Paste
from textual.highlight import highlight
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Footer, Static

from localllm.conversation.chat import AnswerEvents
from localllm.conversation.commands import command_help, execute, strip_triple_quotes
from localllm.conversation.session import Session
from localllm.conversation.turn import Turn
from localllm.errors import LocalLLMError, UsageError
from localllm.formatting import printable
from localllm.protocol.model import Model
from localllm.tui.answering import AnswerEnd, AnswerObserver, AnswerThread, TimedEvent
from localllm.tui.inspector.panel import Inspector
from localllm.tui.live_metrics import IDLE_NUMBERS, AnswerPhase, LiveMetrics, LiveNumbers, render_metrics
from localllm.tui.machine import Machine
from localllm.tui.picker import CommandChosen, SessionChosen
from localllm.tui.prompt import Prompt
from localllm.tui.transcript.view import Transcript
from localllm.tui.turn_screen import TurnScreen

# The numbers under a conversation: of the answer under way, and dimmed of the last one until the next.
FRAME_S = 1 / 30


class MetricsStrip(Widget):
    """Two lines of live metrics, redrawn at most thirty times a second and only when they change."""

    DEFAULT_CSS = """
    MetricsStrip {
        height: 2;
        padding: 0 1;
        text-wrap: nowrap;
        text-overflow: clip;
        &.-idle { text-style: dim; }
    }
    """

    numbers: reactive[LiveNumbers] = reactive(IDLE_NUMBERS)

    def __init__(self, model: Model, clock: Callable[[], float] = time.perf_counter):
        """clock: what the times of events are by."""
        super().__init__(classes="-idle")
        self.model = model
        self.clock = clock
        self.live: LiveMetrics | None = None
        self.frames: Timer | None = None

    def on_mount(self) -> None:
        self.frames = self.set_interval(FRAME_S, self.update_numbers, pause=self.live is None)

    def begin(self, began: float) -> None:
        self.live = LiveMetrics(began, self.model.reads)
        self.update_numbers()
        if self.frames:
            self.frames.resume()

    def follow(self, events: Sequence[TimedEvent]) -> None:
        if self.live:
            self.live.follow(events)

    def end(self, outcome: AnswerEnd) -> None:
        if self.frames:
            self.frames.pause()
        if self.live:
            self.live.end()
        self.update_numbers()

    def update_numbers(self) -> None:
        if self.live:
            self.numbers = self.live.numbers(self.clock())

    def watch_numbers(self, before: LiveNumbers, after: LiveNumbers) -> None:
        self.set_class(after.phase in (AnswerPhase.IDLE, AnswerPhase.ENDED), "-idle")

    def render(self) -> Content:
        return render_metrics(self.numbers, self.model.context, self.size.width)


FRAMES_PER_S = 30
SPLIT_MIN_COLUMNS = 110  # columns from which the inspector stands beside the conversation, and not in its place
DOUBLE_INTERRUPT_S = 2.0  # within which a second Ctrl-C leaves
STOP_TIMEOUT_S = 5.0  # that an answer is given to end, when the app is left


class ChatScreen(TurnScreen):
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

    def __init__(self, session: Session, machine: Machine, early: list[Key | Paste]):
        """early: what was typed before there was a prompt; it is taken."""
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (SPLIT_MIN_COLUMNS, "-wide")]
        self.early_input = early
        self.session, self.machine = session, machine
        self.model, self.chat = session.llm, session.chat
        self.answer_thread: AnswerThread | None = None
        self.question = ""  # of the answer under way, as it was typed
        self.save_message = ""  # when the answer was kept
        self.transcript = Transcript(self.chat)
        self.inspector = Inspector(self.model)
        self.strip = MetricsStrip(self.model)
        self.prompt = Prompt(session.folder.parent / "history", command_help())
        self.side = Horizontal(self.transcript, self.inspector, id="middle")
        self.observers: list[AnswerObserver] = [self.transcript, self.inspector, self.strip]
        self.interrupted_at = -DOUBLE_INTERRUPT_S

    def compose(self) -> ComposeResult:
        told = printable(f"{self.model.name} · {self.model.device} · context {self.model.context:,}")
        yield Static(told, id="head", markup=False)
        yield self.side
        yield self.strip
        yield self.prompt
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.set_interval(1 / FRAMES_PER_S, self.deliver_events)
        self.set_focus(self.prompt.editor)
        while self.early_input:
            self.prompt.editor.post_message(self.early_input.pop(0))
        # The first block of code would else wait 0.1 s for what colours it.
        self.run_worker(lambda: highlight("x = 1", language="python"), thread=True)
        if not self.model.has_chat_template:
            self.say(f"{self.model.name} has no chat template: it continues the text of this conversation")

    # What was typed, and its answer

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
        """Is an answer under way? Says so."""
        if self.answer_thread:
            self.say("an answer is under way; Escape stops it")
        return self.answer_thread is not None

    def run_command(self, line: str) -> None:
        """What begins with a slash. One that is refused goes from the prompt; the arrow up brings it back."""
        if line.split()[:1] in (["/help"], ["/?"]):
            self.action_help()
            return
        if self.is_busy():
            self.prompt.text = line
            return
        at = self.chat.current
        try:
            done = execute(self.session, line)
        except EOFError:
            self.app.exit(0)
            return
        except LocalLLMError as error:
            self.say(str(error), "error")
            return
        if self.chat.current is not at:
            self.transcript.show_branch()
        if done.text:
            self.transcript.show_message(done.text)
        if done.edit_text is not None:
            self.prompt.edit(done.edit_text)
        if done.start_answer:  # /edit TEXT or /regenerate: something else in place of the newest turn
            words = line.split(maxsplit=1)[1:]
            self.start_answer(
                strip_triple_quotes(words[0]) if words else at.question, done.start_answer, at.parent
            )

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
        """Show the question and its answer as it comes; after: the turn that they follow."""
        self.question = question
        self.chat.inspect = self.inspector.inspect
        self.transcript.show_question(question, after or self.chat.root)
        self.prompt.busy = True
        self.answer_thread = AnswerThread(lambda: self.ask_and_save(ask), self.chat.stop)
        for watcher in self.observers:
            watcher.begin(self.answer_thread.began)

    def ask_and_save(self, ask: Callable[[], AnswerEvents]) -> AnswerEvents:
        """The answer, which is kept where it ends: on its own thread, as a file may take its time."""
        try:
            yield from ask()
        finally:
            self.save_message = self.session.save()

    def deliver_events(self) -> None:
        """What came since the last frame, to those who show it."""
        if not self.answer_thread:
            return
        came, ended = self.answer_thread.drain()
        for watcher in self.observers if came else ():
            watcher.follow(came)
        if ended:
            self.answer_thread = None
            for watcher in self.observers:
                watcher.end(ended)
            if self.transcript.failed:
                self.prompt.text = self.prompt.text or self.question
            if self.save_message:
                self.say(self.save_message, "warning")
                self.save_message = ""
            self.prompt.busy = False

    # Panels, stopping, leaving

    async def action_inspector(self) -> None:
        """Open it beside the conversation, or close it."""
        await self.close_settings()
        self.toggle_inspector()

    def toggle_inspector(self) -> None:
        """The keyboard stays with the prompt: Tab leads into the inspector."""
        self.inspector.toggle()
        self.set_class(self.inspector.display, "-inspecting")
        self.set_focus(self.prompt.editor)

    async def action_settings(self) -> None:
        if self.inspector.display:
            self.toggle_inspector()
        await super().action_settings()

    async def action_back(self) -> None:
        """Escape: out of what is innermost."""
        if self.answer_thread:
            self.answer_thread.stop()
        elif self.session.editing:
            self.session.editing, self.prompt.text = None, ""
        elif not await self.close_settings():
            if self.inspector.display and not self.transcript.has_focus:
                self.toggle_inspector()
            self.prompt.focus()

    def action_interrupt(self) -> None:
        """Ctrl-C: copy what is selected, else stop, else clear the line, else a second one leaves."""
        if selected := self.get_selected_text():
            self.copy(selected, "the selection is copied")
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
            self.say("Ctrl-C again leaves, as Ctrl-D does")

    def action_leave(self) -> None:
        if not self.prompt.text:
            self.app.exit(0)

    def action_page(self, step: int) -> None:
        (self.transcript.action_page_up if step < 0 else self.transcript.action_page_down)()

    def on_unmount(self) -> None:
        """What was said so far is kept, however the app is left."""
        if self.answer_thread:
            self.answer_thread.stop_and_join(STOP_TIMEOUT_S)
