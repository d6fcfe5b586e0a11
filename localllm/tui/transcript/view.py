"""The transcript: the turns of the current branch, and the answer under way.

Only turns near the visible ones are widgets, and others are mounted when the user scrolls to them, so that a
conversation of thousands of messages opens as fast as one of ten.
"""

import time
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click, Focus, Resize
from textual.widgets import Static

from localllm.conversation.chat import Chat, Turn, length_limit
from localllm.errors import LocalLLMError
from localllm.formatting import printable
from localllm.request import FinishReason
from localllm.tui.answer_thread import AnswerEnd, TimedEvent
from localllm.tui.transcript.turn_view import TurnView

BATCH_CHARACTERS, BATCH_TURNS = 6_000, 12  # mounted together
MAX_TURNS = 3 * BATCH_TURNS  # mounted at once
IDLE_RATIO = 3  # after drawing, keys get this multiple of the time it took
WELCOME = (
    ("Tell me a story about a fox.", "ask anything; Esc stops the answer"),
    ("@notes.txt Summarise this.", "attach a file; Tab completes names"),
    ("F4", "another model; F1 shows all keys"),
)


class Transcript(VerticalScroll):
    """Shows the turns as an `AnswerObserver`, and lets the user select one to act on."""

    DEFAULT_CSS = """
    Transcript {
        scrollbar-size-vertical: 1; scrollbar-color: $surface-lighten-1; scrollbar-background: $background;
        & > Vertical { height: auto; min-height: 100%; padding: 1 1 0 0; }
        .message { height: auto; margin: 0 0 1 3; color: $text-muted; }
        &:focus TurnView.chosen { border-left: outer $primary; }
    }
    """
    BINDING_GROUP_TITLE = "Conversation"
    BINDINGS: ClassVar = [
        Binding("up,k", "choose(-1)", "Previous turn", show=False),
        Binding("down,j", "choose(1)", "Next turn", show=False),
        Binding("e", "screen.edit_turn", "Edit"),
        Binding("r", "screen.ask_again", "Regenerate"),
        Binding("left", "screen.go_to_branch(-1)", "Branch", key_display="←→"),
        Binding("right", "screen.go_to_branch(1)", "Next branch", show=False),
        Binding("u", "screen.undo", "Undo"),
        Binding("U,ctrl+r", "screen.redo", "Redo", show=False),
        Binding("c", "screen.copy_answer", "Copy"),
        Binding("y", "screen.copy_code", "Copy code"),
        Binding("s", "screen.save_code", "Save code", show=False),
        Binding("n", "screen.choose_code(1)", "Next code", show=False),
        Binding("N", "screen.choose_code(-1)", "Previous code", show=False),
        Binding("t", "screen.unfold", "Unfold"),
        Binding("home,g", "first", "First turn", show=False),
        Binding("end,G", "last", "Last turn", show=False),
    ]

    def __init__(self, chat: Chat):
        self.turns = (
            Vertical()
        )  # at least as high as the window: an anchored container would align turns at its bottom
        self.welcome = Welcome()
        super().__init__(self.welcome, self.turns, id="transcript")
        self.chat = chat
        self.views: list[TurnView] = []
        self.first = 0  # index of the first view's turn in the branch
        self.live: TurnView | None = None  # of the answer under way
        self.failed: TurnView | None = None  # of a question that got no answer
        self.message: Static | None = None  # output of a command
        self.before = chat.current  # the current turn before the question under way
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

    # Turns of the branch

    def show_end(self) -> None:
        """Show the newest turns."""
        turns = self.chat.turns
        self.show(turns, _batch_start(turns, len(turns)), len(turns))
        self.scroll_end(animate=False)

    def show_branch(self, chosen: Turn | None = None) -> None:
        """Show the current branch after a switch, and select the turn `chosen`."""
        self.clear_messages()
        self.refresh_branch()
        self.select(next((view for view in self.views if view.turn is chosen), None))

    def refresh_branch(self) -> None:
        """Show the current branch, keeping the views of turns that were shown before."""
        turns = self.chat.turns
        starts_alike = bool(self.views) and self.views[0].turn in turns[self.first : self.first + 1]
        last = len(turns)
        if not starts_alike or last - self.first > MAX_TURNS:
            self.show_end()
        else:
            self.show(turns, self.first, last)
        for view in self.views:
            view.show_siblings()
        self.anchor()

    def show(self, turns: Sequence[Turn], first: int, last: int) -> None:
        """Show `turns[first:last]`, reusing existing views."""
        existing = {id(view.turn): view for view in self.views if view.turn}
        views = [existing.pop(id(turn), None) or self.view_of(turn) for turn in turns[first:last]]
        for view in [*self.views]:
            if view not in views:
                view.remove()
                if view is self.selected:
                    self.selected = None
        new = [view for view in views if not view.is_attached]
        if new:
            # New views are all before or all after those that remain, if any remain.
            self.turns.mount_all(new, before=0 if views[-1] not in new and self.turns.children else self.failed)
        self.views, self.first = views, first
        self.show_welcome(not (views or self.failed or self.live))

    def show_welcome(self, shown: bool) -> None:
        """Show the welcome in place of turns, or hide it."""
        self.welcome.display, self.turns.display = shown, not shown

    def view_of(self, turn: Turn) -> TurnView:
        return TurnView(turn.question, turn, *self.notes.get(turn, ("", "")))

    def load_more(self, before: bool) -> None:
        """Mount turns before the current views, or after them, without moving the visible text."""
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
        visible = next((view for view in self.views if view.virtual_region.bottom > self.scroll_y), self.views[0])
        y = visible.virtual_region.y - self.scroll_y
        self.is_loading = True
        self.show(turns, first, last)

        def restore_position() -> None:
            self.is_loading = False
            if visible.is_attached:
                self.scroll_to(y=visible.virtual_region.y - y, animate=False, immediate=True)

        self.call_after_refresh(restore_position)

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

    # The selected turn, on which keys act

    def select(self, view: TurnView | None) -> None:
        if self.selected:
            self.selected.remove_class("chosen")
        self.selected = view
        if view:
            view.add_class("chosen")

    def action_choose(self, step: int) -> None:
        if not self.views:
            return
        index = self.views.index(self.selected) + step if self.selected in self.views else len(self.views) - 1
        view = self.views[min(max(index, 0), len(self.views) - 1)]
        self.select(view)
        self.scroll_to_widget(view, animate=False, top=view.region.height > self.size.height)

    # The answer under way

    def show_question(self, question: str, after: Turn) -> None:
        """Show a question whose answer is about to begin, after the turn `after`."""
        self.clear_messages()
        turns = after.path
        self.show(turns, max(0, _batch_start(turns, len(turns))), len(turns))
        self.before = self.chat.current
        self.live = TurnView(question, None, "…")
        self.show_welcome(False)
        self.turns.mount(self.live)
        self.anchor()

    def begin(self, began: float) -> None:
        """Do nothing: `show_question` has already shown the question."""

    def follow(self, events: Sequence[TimedEvent]) -> None:
        if self.live and not self.draw_scheduled:
            self.draw_scheduled = True
            self.set_timer(max(0.001, self.next_draw_at - time.perf_counter()), self.draw)

    def draw(self) -> None:
        """Show the new part of the answer, then leave time for keys before drawing again."""
        self.draw_scheduled = False
        if not self.live:
            return
        if self.live.turn is None and self.chat.current is not self.before:
            self.live.turn = self.chat.current
            self.live.set_note("")
        if self.live.turn is None:
            return
        start = time.perf_counter()
        self.live.update_answer()

        def schedule_next() -> None:
            now = time.perf_counter()
            self.next_draw_at = now + IDLE_RATIO * (now - start)

        self.call_after_refresh(schedule_next)

    def end(self, outcome: AnswerEnd) -> None:
        view, self.live = self.live, None
        if view is None:
            return
        if self.chat.current is self.before:  # no answer
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
        """Return the note below an ended answer, and its severity."""
        if outcome.error or turn.finish_reason is None:
            return _failure_note(outcome)
        if turn.finish_reason == FinishReason.LENGTH:
            limit, remedy = length_limit(self.chat.model, self.chat.params, turn.metrics)
            return f"cut by {limit}; {remedy}", "warning"
        return ("", "") if turn.answer else ("empty answer", "")

    def show_message(self, text: str) -> None:
        """Show the output of a command until the next command or question."""
        self.clear_messages()
        self.message = Static(Content(printable(text)), classes="message")
        self.turns.mount(self.message)
        self.show_welcome(False)
        self.anchor()

    def clear_messages(self) -> None:
        """Remove the output of a command, and a question without an answer, which is in the prompt again."""
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
            f"error: {name}: {outcome.error}; this is a bug in localllm, LOCALLLM_DEBUG=1 shows where",
            "error",
        )
    return "stopped", ""


def _batch_start(turns: Sequence[Turn], last: int) -> int:
    """Return the index at which a batch of turns that ends before `last` begins."""
    first, characters = last, 0
    while first > 0 and last - first < BATCH_TURNS and characters < BATCH_CHARACTERS:
        first -= 1
        characters += len(turns[first].question) + len(turns[first].answer)
    return first


def _batch_end(turns: Sequence[Turn], first: int) -> int:
    """Return the index before which a batch of turns that begins at `first` ends."""
    last, characters = first, 0
    while last < len(turns) and last - first < BATCH_TURNS and characters < BATCH_CHARACTERS:
        characters += len(turns[last].question) + len(turns[last].answer)
        last += 1
    return last


class Welcome(Static):
    """Things to try in an empty conversation, with descriptions beside them, or below in a narrow window."""

    DEFAULT_CSS = """
    Welcome { height: auto; padding: 2 1 0 3; &.-narrow { padding: 0 1; } }
    """
    NAME_CELLS = 32

    def on_resize(self, event: Resize) -> None:
        width = self.outer_size.width  # does not depend on the padding, which the class changes
        is_narrow = width < self.NAME_CELLS + max(len(description) for _, description in WELCOME) + 4
        self.set_class(is_narrow, "-narrow")
        lines = [Content("Three things to try"), *[Content("")] * (not is_narrow)]
        for name, description in WELCOME:
            if not is_narrow:
                name = f"{name:<{self.NAME_CELLS}}"
            else:
                name += "  " if len(name) + 2 + len(description) <= width - 2 else "\n  "
            lines.append(Content.assemble((name, "bold"), (description, "$text-muted")))
        self.update(Content("\n").join(lines))
