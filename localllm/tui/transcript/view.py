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

from localllm.conversation.chat import Chat
from localllm.conversation.limits import what_cut
from localllm.conversation.turn import Turn
from localllm.errors import LocalLLMError
from localllm.request import FinishReason
from localllm.tui.answering import Came, Ended
from localllm.tui.transcript.turn_view import TurnView
from localllm.visible import visible

BATCH_CHARACTERS, BATCH_TURNS = 6_000, 12  # that become widgets together
MOST_TURNS = 3 * BATCH_TURNS  # that are widgets
REST = 3  # times that drawing a piece of an answer took are left to the keys after it


class Transcript(VerticalScroll):
    DEFAULT_CSS = """
    Transcript {
        scrollbar-size-vertical: 1; scrollbar-color: $surface-lighten-1; scrollbar-background: $background;
        & > Vertical { height: auto; min-height: 100%; padding: 1 1 0 0; }
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
        super().__init__(self.turns, id="transcript")
        self.chat = chat
        self.views: list[TurnView] = []
        self.first = 0  # place of the first view's turn in the branch
        self.live: TurnView | None = None  # whose answer is under way
        self.failed: TurnView | None = None  # whose question got no answer
        self.told: Static | None = None  # what a command had to say
        self.before = chat.at  # when the question under way was asked
        self.remarks: dict[Turn, tuple[str, str]] = {}
        self.chosen: TurnView | None = None
        self.may_draw_at = 0.0
        self.is_waiting = self.is_moving = False

    def on_mount(self) -> None:
        self.show_end()
        self.anchor()

    def on_focus(self, event: Focus) -> None:
        self.choose(self.chosen or (self.views[-1] if self.views else None))

    def on_click(self, event: Click) -> None:
        widget = event.widget
        if widget:
            self.choose(next((node for node in widget.ancestors_with_self if isinstance(node, TurnView)), None))

    # What is shown of the branch

    def show_end(self) -> None:
        """The newest turns, whatever was shown before."""
        turns = self.chat.turns
        self.show(turns, _start(turns, len(turns)), len(turns))
        self.scroll_end(animate=False)

    def show_branch(self, chosen: Turn | None = None) -> None:
        """After the conversation went on from elsewhere; chosen: the turn that keys are to act on."""
        self.settle()
        self.refresh_branch()
        self.choose(next((view for view in self.views if view.turn is chosen), None))

    def refresh_branch(self) -> None:
        """Turns that both branches have stay where they are."""
        turns = self.chat.turns
        kept = 0
        for view, turn in zip(self.views, turns[self.first :], strict=False):
            if view.turn is not turn:
                break
            kept += 1
        last = len(turns)
        if not kept or last - self.first > MOST_TURNS:
            self.show_end()
        else:
            self.show(turns, self.first, last)
        for view in self.views:
            view.show_ways()
        self.anchor()

    def show(self, turns: Sequence[Turn], first: int, last: int) -> None:
        """These turns of the branch; those that are shown already are left as they are."""
        shown = {id(view.turn): view for view in self.views if view.turn}
        views = [shown.pop(id(turn), None) or self.view_of(turn) for turn in turns[first:last]]
        for view in [*self.views]:
            if view not in views:
                view.remove()
                if view is self.chosen:
                    self.chosen = None
        new = [view for view in views if not view.is_attached]
        if new:
            # New ones stand on one side of those that stay, or there are none that stay.
            self.turns.mount_all(new, before=0 if views[-1] not in new and self.turns.children else self.failed)
        self.views, self.first = views, first

    def view_of(self, turn: Turn) -> TurnView:
        return TurnView(turn.question, turn, *self.remarks.get(turn, ("", "")))

    def bring(self, before: bool) -> None:
        """Turns before those that are shown, or after them; what can be seen stays where it is."""
        turns = self.chat.turns
        first, last = self.first, self.first + len(self.views)
        if self.is_moving or (first == 0 if before else self.live or last >= len(turns)):
            return
        if before:
            first = _start(turns, first)
            last = last if self.live else min(last, first + MOST_TURNS)
        else:
            last = _end(turns, last)
            first = max(first, last - MOST_TURNS)
        fixed = next((view for view in self.views if view.virtual_region.bottom > self.scroll_y), self.views[0])
        y = fixed.virtual_region.y - self.scroll_y
        self.is_moving = True
        self.show(turns, first, last)

        def stay() -> None:
            self.is_moving = False
            if fixed.is_attached:
                self.scroll_to(y=fixed.virtual_region.y - y, animate=False, immediate=True)

        self.call_after_refresh(stay)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value) and self.views:
            self.look_around()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.look_around)

    def look_around(self) -> None:
        if self.scroll_y < self.size.height:
            self.bring(before=True)
        elif self.scroll_y > self.max_scroll_y - self.size.height:
            self.bring(before=False)

    def action_first(self) -> None:
        if not self.live:
            turns = self.chat.turns
            self.show(turns, 0, _end(turns, 0))
        self.scroll_home(animate=False)

    def action_last(self) -> None:
        if self.first + len(self.views) < len(self.chat.turns):
            self.show_end()
        self.anchor()

    # The turn that keys act on

    def choose(self, view: TurnView | None) -> None:
        if self.chosen:
            self.chosen.remove_class("chosen")
        self.chosen = view
        if view:
            view.add_class("chosen")

    def action_choose(self, step: int) -> None:
        if not self.views:
            return
        place = self.views.index(self.chosen) + step if self.chosen in self.views else len(self.views) - 1
        view = self.views[min(max(place, 0), len(self.views) - 1)]
        self.choose(view)
        self.scroll_to_widget(view, animate=False, top=view.region.height > self.size.height)

    # The answer under way

    def ask(self, question: str, after: Turn) -> None:
        """Show a question whose answer is about to come, behind the turn that it follows."""
        self.settle()
        turns = after.path
        self.show(turns, max(0, _start(turns, len(turns))), len(turns))
        self.before = self.chat.at
        self.live = TurnView(question, None, "…")
        self.turns.mount(self.live)
        self.anchor()

    def begin(self, began: float) -> None:
        """Nothing comes of an answer that has not begun; `ask` has shown its question."""

    def follow(self, came: Sequence[Came]) -> None:
        if self.live and not self.is_waiting:
            self.is_waiting = True
            self.set_timer(max(0.001, self.may_draw_at - time.perf_counter()), self.draw)

    def draw(self) -> None:
        """Show what came since; the next time only after a while that the keys have to themselves."""
        self.is_waiting = False
        if not self.live:
            return
        if self.live.turn is None and self.chat.at is not self.before:
            self.live.turn = self.chat.at
            self.live.say("")
        if self.live.turn is None:
            return
        began = time.perf_counter()
        self.live.grow()

        def drawn() -> None:
            now = time.perf_counter()
            self.may_draw_at = now + REST * (now - began)

        self.call_after_refresh(drawn)

    def end(self, ended: Ended) -> None:
        view, self.live = self.live, None
        if view is None:
            return
        if self.chat.at is self.before:  # there was no answer
            self.failed = view
            view.turn = None
            view.show_thoughts()
            view.finish(*_what_happened(ended))
            self.refresh_branch()
            return
        view.turn = turn = self.chat.at
        self.views.append(view)
        self.remarks[turn] = self.remark(turn, ended)
        view.finish(*self.remarks[turn])
        view.show_ways()

    def remark(self, turn: Turn, ended: Ended) -> tuple[str, str]:
        """What is to be said below an answer that has ended, and of which kind that is."""
        if ended.error or turn.finish_reason is None:
            return _what_happened(ended)
        if turn.finish_reason == FinishReason.LENGTH:
            tokens = turn.metrics.output_tokens if turn.metrics else 0
            limit, remedy = what_cut(self.chat.model, self.chat.params, tokens)
            return f"cut by {limit}; {remedy}", "warning"
        return ("", "") if turn.answer else ("an answer of no words", "")

    def tell(self, text: str) -> None:
        """What a command has to say, until the next one or the next question."""
        self.settle()
        self.told = Static(Content(visible(text)), classes="told")
        self.turns.mount(self.told)
        self.anchor()

    def settle(self) -> None:
        """What was told goes, and so does a question that was not answered, as it stands in the prompt again."""
        for widget in (self.failed, self.told):
            if widget:
                widget.remove()
        self.failed = self.told = None


def _what_happened(ended: Ended) -> tuple[str, str]:
    if isinstance(ended.error, LocalLLMError):
        return f"error: {ended.error}", "error"
    if ended.error:
        name = type(ended.error).__name__
        return f"error: {name}: {ended.error}; this is a fault of localllm, LOCALLLM_DEBUG=1 shows where", "error"
    return "stopped", ""


def _start(turns: Sequence[Turn], last: int) -> int:
    """Where to begin, so that a batch of turns ends before `last`."""
    first, characters = last, 0
    while first > 0 and last - first < BATCH_TURNS and characters < BATCH_CHARACTERS:
        first -= 1
        characters += len(turns[first].question) + len(turns[first].answer)
    return first


def _end(turns: Sequence[Turn], first: int) -> int:
    """Where to end a batch of turns that begins at `first`."""
    last, characters = first, 0
    while last < len(turns) and last - first < BATCH_TURNS and characters < BATCH_CHARACTERS:
        characters += len(turns[last].question) + len(turns[last].answer)
        last += 1
    return last
