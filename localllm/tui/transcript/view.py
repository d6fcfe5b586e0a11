"""What was said on this branch, and the answer under way.

Only the turns near those that can be seen are widgets; others become some when one scrolls to them, so that a
conversation of thousands of messages opens as one of ten.
"""

import time
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click, Focus, Resize
from textual.widgets import Static

from localllm.conversation.chat import Chat, length_limit
from localllm.conversation.turn import Turn
from localllm.errors import LocalLLMError
from localllm.formatting import printable
from localllm.request import FinishReason
from localllm.tui.answering import AnswerEnd, TimedEvent
from localllm.tui.transcript.turn_view import TurnView

BATCH_CHARACTERS, BATCH_TURNS = 6_000, 12  # that become widgets together
MAX_TURNS = 3 * BATCH_TURNS  # that are widgets
IDLE_RATIO = 3  # times that drawing a piece of an answer took are left to the keys after it


# What an empty conversation shows: things to try, each with what it does.
WELCOME = (
    ("Tell me a story about a fox.", "ask anything; Esc stops the answer"),
    ("@notes.txt Summarise this.", "@ and Tab put a file before a question"),
    ("F4", "choose another model; F1 shows all keys"),
)


class Transcript(VerticalScroll):
    DEFAULT_CSS = """
    Transcript {
        scrollbar-size-vertical: 1; scrollbar-color: $surface-lighten-1; scrollbar-background: $background;
        & > Vertical { height: auto; min-height: 100%; padding: 1 1 0 0; }
        #welcome { height: auto; padding: 2 1 0 3; }
        .told { height: auto; margin: 0 0 1 3; color: $text-muted; }
        &:focus TurnView.chosen { border-left: outer $primary; }
    }
    """
    BINDING_GROUP_TITLE = "Conversation"
    BINDINGS: ClassVar = [
        Binding("up,k", "choose(-1)", "Turn before", show=False),
        Binding("down,j", "choose(1)", "Turn after", show=False),
        Binding("e", "screen.edit_turn", "Edit"),
        Binding("r", "screen.ask_again", "Again"),
        Binding("left", "screen.go_to_branch(-1)", "Branch", key_display="←→"),
        Binding("right", "screen.go_to_branch(1)", "Next branch", show=False),
        Binding("u", "screen.undo", "Undo"),
        Binding("U,ctrl+r", "screen.redo", "Bring back", show=False),
        Binding("c", "screen.copy_answer", "Copy"),
        Binding("y", "screen.copy_code", "Copy code"),
        Binding("s", "screen.save_code", "Save code", show=False),
        Binding("n", "screen.choose_code(1)", "Next code", show=False),
        Binding("N", "screen.choose_code(-1)", "Code before", show=False),
        Binding("t", "screen.fold_thoughts", "Thoughts"),
        Binding("home,g", "first", "Beginning", show=False),
        Binding("end,G", "last", "End", show=False),
    ]

    def __init__(self, chat: Chat):
        # Of at least the window's height, as Textual would else hang few turns at its bottom.
        self.turns = Vertical()
        lines = (Content.assemble((f"{line:<32}", "bold"), (what, "$text-muted")) for line, what in WELCOME)
        self.welcome = Static(
            Content("\n").join([Content("Three things to try"), Content(""), *lines]), id="welcome"
        )
        super().__init__(self.welcome, self.turns, id="transcript")
        self.chat = chat
        self.views: list[TurnView] = []
        self.first = 0  # place of the first view's turn in the branch
        self.live: TurnView | None = None  # whose answer is under way
        self.failed: TurnView | None = None  # whose question got no answer
        self.message: Static | None = None  # what a command had to say
        self.before = chat.current  # when the question under way was asked
        self.notes: dict[Turn, tuple[str, str]] = {}
        self.selected: TurnView | None = None
        self.next_draw_at = 0.0
        self.draw_scheduled = self.is_loading = False

    def on_mount(self) -> None:
        self.show_end()
        self.anchor()

    def on_focus(self, event: Focus) -> None:
        self.select(self.selected or (self.views[-1] if self.views else None))

    def on_click(self, event: Click) -> None:
        widget = event.widget
        if widget:
            self.select(next((node for node in widget.ancestors_with_self if isinstance(node, TurnView)), None))

    # What is shown of the branch

    def show_end(self) -> None:
        """The newest turns, whatever was shown before."""
        turns = self.chat.turns
        self.show(turns, _batch_start(turns, len(turns)), len(turns))
        self.scroll_end(animate=False)

    def show_branch(self, chosen: Turn | None = None) -> None:
        """After the conversation went on from elsewhere; chosen: the turn that keys are to act on."""
        self.clear_messages()
        self.refresh_branch()
        self.select(next((view for view in self.views if view.turn is chosen), None))

    def refresh_branch(self) -> None:
        """Turns that both branches have stay where they are."""
        turns = self.chat.turns
        kept = 0
        for view, turn in zip(self.views, turns[self.first :], strict=False):
            if view.turn is not turn:
                break
            kept += 1
        last = len(turns)
        if not kept or last - self.first > MAX_TURNS:
            self.show_end()
        else:
            self.show(turns, self.first, last)
        for view in self.views:
            view.show_siblings()
        self.anchor()

    def show(self, turns: Sequence[Turn], first: int, last: int) -> None:
        """These turns of the branch; those that are shown already are left as they are."""
        shown = {id(view.turn): view for view in self.views if view.turn}
        views = [shown.pop(id(turn), None) or self.view_of(turn) for turn in turns[first:last]]
        for view in [*self.views]:
            if view not in views:
                view.remove()
                if view is self.selected:
                    self.selected = None
        new = [view for view in views if not view.is_attached]
        if new:
            # New ones stand on one side of those that stay, or there are none that stay.
            self.turns.mount_all(new, before=0 if views[-1] not in new and self.turns.children else self.failed)
        self.views, self.first = views, first
        self.show_welcome(not (views or self.failed or self.live))

    def show_welcome(self, shown: bool) -> None:
        """Show the things to try in place of turns, or hide them."""
        self.welcome.display, self.turns.display = shown, not shown

    def view_of(self, turn: Turn) -> TurnView:
        return TurnView(turn.question, turn, *self.notes.get(turn, ("", "")))

    def load_more(self, before: bool) -> None:
        """Turns before those that are shown, or after them; what can be seen stays where it is."""
        turns = self.chat.turns
        first, last = self.first, self.first + len(self.views)
        if self.is_loading or (first == 0 if before else self.live or last >= len(turns)):
            return
        if before:
            first = _batch_start(turns, first)
            last = last if self.live else min(last, first + MAX_TURNS)
        else:
            last = _batch_end(turns, last)
            first = max(first, last - MAX_TURNS)
        fixed = next((view for view in self.views if view.virtual_region.bottom > self.scroll_y), self.views[0])
        y = fixed.virtual_region.y - self.scroll_y
        self.is_loading = True
        self.show(turns, first, last)

        def stay() -> None:
            self.is_loading = False
            if fixed.is_attached:
                self.scroll_to(y=fixed.virtual_region.y - y, animate=False, immediate=True)

        self.call_after_refresh(stay)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value) and self.views:
            self.load_near_edges()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.load_near_edges)

    def load_near_edges(self) -> None:
        if self.scroll_y < self.size.height:
            self.load_more(before=True)
        elif self.scroll_y > self.max_scroll_y - self.size.height:
            self.load_more(before=False)

    def action_first(self) -> None:
        if not self.live:
            turns = self.chat.turns
            self.show(turns, 0, _batch_end(turns, 0))
        self.scroll_home(animate=False)

    def action_last(self) -> None:
        if self.first + len(self.views) < len(self.chat.turns):
            self.show_end()
        self.anchor()

    # The turn that keys act on

    def select(self, view: TurnView | None) -> None:
        if self.selected:
            self.selected.remove_class("chosen")
        self.selected = view
        if view:
            view.add_class("chosen")

    def action_choose(self, step: int) -> None:
        if not self.views:
            return
        place = self.views.index(self.selected) + step if self.selected in self.views else len(self.views) - 1
        view = self.views[min(max(place, 0), len(self.views) - 1)]
        self.select(view)
        self.scroll_to_widget(view, animate=False, top=view.region.height > self.size.height)

    # The answer under way

    def show_question(self, question: str, after: Turn) -> None:
        """Show a question whose answer is about to come, behind the turn that it follows."""
        self.clear_messages()
        turns = after.path
        self.show(turns, max(0, _batch_start(turns, len(turns))), len(turns))
        self.before = self.chat.current
        self.live = TurnView(question, None, "…")
        self.show_welcome(False)
        self.turns.mount(self.live)
        self.anchor()

    def begin(self, began: float) -> None:
        """Nothing comes of an answer that has not begun; `ask` has shown its question."""

    def follow(self, events: Sequence[TimedEvent]) -> None:
        if self.live and not self.draw_scheduled:
            self.draw_scheduled = True
            self.set_timer(max(0.001, self.next_draw_at - time.perf_counter()), self.draw)

    def draw(self) -> None:
        """Show what came since; the next time only after a while that the keys have to themselves."""
        self.draw_scheduled = False
        if not self.live:
            return
        if self.live.turn is None and self.chat.current is not self.before:
            self.live.turn = self.chat.current
            self.live.set_note("")
        if self.live.turn is None:
            return
        began = time.perf_counter()
        self.live.update_answer()

        def drawn() -> None:
            now = time.perf_counter()
            self.next_draw_at = now + IDLE_RATIO * (now - began)

        self.call_after_refresh(drawn)

    def end(self, outcome: AnswerEnd) -> None:
        view, self.live = self.live, None
        if view is None:
            return
        if self.chat.current is self.before:  # there was no answer
            self.failed = view
            view.turn = None
            view.show_thoughts()
            view.finish(*_failure_note(outcome))
            self.refresh_branch()
            return
        view.turn = turn = self.chat.current
        self.views.append(view)
        self.notes[turn] = self.note_for(turn, outcome)
        view.finish(*self.notes[turn])
        view.show_siblings()

    def note_for(self, turn: Turn, outcome: AnswerEnd) -> tuple[str, str]:
        """What is to be said below an answer that has ended, and of which kind that is."""
        if outcome.error or turn.finish_reason is None:
            return _failure_note(outcome)
        if turn.finish_reason == FinishReason.LENGTH:
            tokens = turn.metrics.output_tokens if turn.metrics else 0
            limit, remedy = length_limit(self.chat.model, self.chat.params, tokens)
            return f"cut by {limit}; {remedy}", "warning"
        return ("", "") if turn.answer else ("an answer of no words", "")

    def show_message(self, text: str) -> None:
        """What a command has to say, until the next one or the next question."""
        self.clear_messages()
        self.message = Static(Content(printable(text)), classes="told")
        self.turns.mount(self.message)
        self.show_welcome(False)
        self.anchor()

    def clear_messages(self) -> None:
        """What was told goes, and so does a question that was not answered, as it stands in the prompt again."""
        for widget in (self.failed, self.message):
            if widget:
                widget.remove()
        self.failed = self.message = None


def _failure_note(outcome: AnswerEnd) -> tuple[str, str]:
    if isinstance(outcome.error, LocalLLMError):
        return f"error: {outcome.error}", "error"
    if outcome.error:
        name = type(outcome.error).__name__
        return (
            f"error: {name}: {outcome.error}; this is a fault of localllm, LOCALLLM_DEBUG=1 shows where",
            "error",
        )
    return "stopped", ""


def _batch_start(turns: Sequence[Turn], last: int) -> int:
    """Where to begin, so that a batch of turns ends before `last`."""
    first, characters = last, 0
    while first > 0 and last - first < BATCH_TURNS and characters < BATCH_CHARACTERS:
        first -= 1
        characters += len(turns[first].question) + len(turns[first].answer)
    return first


def _batch_end(turns: Sequence[Turn], first: int) -> int:
    """Where to end a batch of turns that begins at `first`."""
    last, characters = first, 0
    while last < len(turns) and last - first < BATCH_TURNS and characters < BATCH_CHARACTERS:
        characters += len(turns[last].question) + len(turns[last].answer)
        last += 1
    return last
