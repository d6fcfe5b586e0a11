"""The inspector: what the engine does for an answer, live and afterwards, in three views."""

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import ContentSwitcher, Static

from localllm.conversation.model import Model
from localllm.tui.answer_thread import AnswerEnd, TimedEvent
from localllm.tui.inspector.blocks import Blocks
from localllm.tui.inspector.record import AnswerRecord
from localllm.tui.inspector.timeline import Timeline
from localllm.tui.inspector.tokens import Candidates, Tokens

CANDIDATES_PER_TOKEN = 8
FRAME_S = 0.125
LEGEND = Content.assemble(
    "Probability: ",
    ("≥90%", "$text-success"),
    ("  ≥50%", "$text-warning"),
    "  ",
    ("≥10%", "$warning underline"),
    "  ",
    ("<10%", "$text-error bold underline"),
    "  ✓ draft accepted  ✗ rejected",
)
VIEW_TITLES = {"timeline": "Timeline", "tokens": "Tokens", "blocks": "KV blocks"}
VIEWS: dict[str, type[Timeline | Tokens | Blocks]] = {"timeline": Timeline, "tokens": Tokens, "blocks": Blocks}


class Tab(Static):
    DEFAULT_CSS = """
    Tab { width: auto; height: 1; padding: 0 1; color: $text-muted; &.-chosen { text-style: bold reverse; } }
    """

    class Pressed(Message):
        def __init__(self, view: str):
            super().__init__()
            self.view = view

    def __init__(self, number: int, view: str):
        super().__init__(Content(f"{number} {VIEW_TITLES[view]}"), id=f"tab-{view}")
        self.view = view

    def on_click(self) -> None:
        self.post_message(self.Pressed(self.view))


class Inspector(Widget):
    """The panel with the three views, hidden at first."""

    DEFAULT_CSS = """
    Inspector {
        width: 1fr; height: 1fr; layout: vertical; display: none; padding: 0 1;
        & #tabs { height: 1; }
        & ContentSwitcher { height: 1fr; }
        & .about { height: 1; color: $text-muted; }
    }
    """
    BINDING_GROUP_TITLE = "Inspector"
    BINDINGS: ClassVar = [
        Binding("1", "view('timeline')", "Timeline", show=False),
        Binding("2", "view('tokens')", "Tokens", show=False),
        Binding("3", "view('blocks')", "KV blocks", show=False),
    ]

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.record = AnswerRecord(self.text_of, self.is_special)
        self.needs_redraw = False

    def compose(self) -> ComposeResult:
        with Horizontal(id="tabs"):
            yield from (Tab(number, view) for number, view in enumerate(VIEWS, 1))
        with ContentSwitcher(initial="timeline"):
            yield Timeline(self.record)
            with Vertical(id="tokens"):
                yield Static(LEGEND, classes="about")
                yield Tokens(self.record)
                yield Candidates(self.text_of)
            yield Blocks(self.record, self.model)

    def on_mount(self) -> None:
        self.set_interval(FRAME_S, self.draw)
        self.highlight_tab()

    @property
    def inspect(self) -> int:
        """`ChatRequest.inspect` of the next answer: the number of candidates per token, 0 while the panel is
        closed.
        """
        return CANDIDATES_PER_TOKEN if self.display else 0

    @property
    def view(self) -> str:
        return self.query_one(ContentSwitcher).current or "timeline"

    def toggle(self) -> None:
        """Open or close the panel without moving the focus."""
        self.display = not self.display
        self.needs_redraw = True
        if self.display:
            self.draw()

    def action_view(self, view: str) -> None:
        self.query_one(ContentSwitcher).current = view
        self.needs_redraw = True
        self.highlight_tab()
        self.draw()
        self.focus_view()

    def on_tab_pressed(self, event: Tab.Pressed) -> None:
        self.action_view(event.view)

    def on_tokens_chosen(self, event: Tokens.Chosen) -> None:
        self.query_one(Candidates).show(event.token)

    def focus_view(self) -> None:
        self.query_one(VIEWS[self.view]).focus(scroll_visible=False)

    def highlight_tab(self) -> None:
        for tab in self.query(Tab):
            tab.set_class(tab.view == self.view, "-chosen")

    def begin(self, began: float) -> None:
        self.record = AnswerRecord(self.text_of, self.is_special)
        self.needs_redraw = True

    def follow(self, events: Sequence[TimedEvent]) -> None:
        self.record.follow(events)
        self.needs_redraw = True

    def end(self, outcome: AnswerEnd) -> None:
        self.needs_redraw = True

    def draw(self) -> None:
        """Update the visible view if anything has changed."""
        if self.needs_redraw and self.display:
            self.needs_redraw = False
            self.query_one(VIEWS[self.view]).show(self.record)

    def text_of(self, token: int) -> str:
        """Return a token's text, "" if a server did not report it.

        It is decoded after another token, because some decoders omit the space before the first one.
        """
        decode = self.model.tokenizer.decode
        try:
            text = decode([token], skip_special=False)
            return decode([token, token], skip_special=False)[len(text) :] or text
        except LookupError:
            return ""

    def is_special(self, token: int) -> bool:
        """Return whether texts omit a token; False if a server did not report it."""
        try:
            return not self.model.tokenizer.decode([token], skip_special=True) and bool(self.text_of(token))
        except LookupError:
            return False
