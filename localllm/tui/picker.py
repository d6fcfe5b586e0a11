"""A screen that lists things, of which one is chosen: type to search, arrows and mouse move, Enter chooses.

What is listed, and how it looks, is said by those who inherit. Finding may take its time: a thread does it.
"""

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Static
from textual.worker import get_current_worker

from localllm.formatting import printable

# What a person has chosen in a list or in the palette: messages to the screen of the conversation.


class ModelChosen(Message):
    """The conversation is to go on with this model."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class SessionChosen(Message):
    """This kept conversation is to be gone on with."""

    def __init__(self, id: str):
        super().__init__()
        self.id = id


class CommandChosen(Message):
    """A slash command is to be done; it is to be finished in the prompt first where it is not whole."""

    def __init__(self, line: str, is_whole: bool):
        super().__init__()
        self.line = line
        self.is_complete = is_whole


Row = TypeVar("Row")
Chosen = TypeVar("Chosen")
MAX_ROWS = 200  # laid out at once, so that each key is answered soon; a search finds the others
DETAILS_MIN_COLUMNS = 110  # columns from which details stand beside the list, not below it


class Search(Input):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "submit", "Choose", key_display="⏎")]


class Rows(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Choose", key_display="⏎")]
    DEFAULT_CSS = """
    Rows, Rows:focus {
        height: 1fr;
        border: none;
        padding: 0 1;
        background: $background;
        background-tint: transparent;
        scrollbar-gutter: stable;
        scrollbar-size-vertical: 1;
        & > .option-list--option { padding: 0; }
        & > .option-list--option-highlighted {
            background: $block-cursor-background;
            color: $block-cursor-foreground;
            text-style: bold;
        }
        &:nocolor > .option-list--option-highlighted { text-style: bold underline; }
    }
    """

    class Resized(Message):
        """Its lines are to be laid out anew."""

    def on_resize(self) -> None:
        self.post_message(self.Resized())


class Picker(Screen[Chosen], Generic[Row, Chosen]):
    AUTO_FOCUS: ClassVar[str | None] = "Search"
    BINDING_GROUP_TITLE = "Lists"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("up", "move('cursor_up')", "Move up", show=False),
        Binding("down", "move('cursor_down')", "Move down", show=False),
        Binding("pageup", "move('page_up')", "A page up", show=False),
        Binding("pagedown", "move('page_down')", "A page down", show=False),
    ]
    DEFAULT_CSS = """
    Picker {
        #title { height: 1; padding: 0 1; text-style: bold; color: $primary; }
        #search {
            height: 1; border: none; padding: 0 1; background: $surface;
            &:focus { background: $panel; background-tint: transparent; }
            & > .input--placeholder { color: $text-muted; }
        }
        #columns { height: 1; padding: 0 2 0 1; color: $text-muted; }
        #found { height: 1fr; }
        #list { height: 1fr; width: 1fr; }
        #said { height: auto; max-height: 50%; padding: 0 1; display: none; }
        #details { height: auto; max-height: 8; padding: 0 1; border-top: solid $panel; }
        &.-wide #found { layout: horizontal; }
        &.-wide #details { width: 52; height: 1fr; max-height: 100%; border-top: none; border-left: solid $panel; }
    }
    """
    title_text = ""
    search_hint = "type to search"
    empty_text = "nothing is found"

    def __init__(self) -> None:
        super().__init__()
        self.items: Sequence[Row] = ()
        self.shown_items: Sequence[Row] = ()

    def find(self, query: str) -> Sequence[Row]:
        """On a thread of its own; what it raises is shown in place of the list."""
        raise NotImplementedError

    def columns(self, width: int) -> str:
        """What stands above the columns of the list; empty: nothing."""
        return ""

    def item_line(self, row: Row, width: int) -> Content:
        """One line of so many cells."""
        raise NotImplementedError

    def details(self, row: Row) -> Content:
        raise NotImplementedError

    def choose(self, row: Row) -> None:
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        yield Static(self.title_text, id="title", markup=False)
        yield Search(placeholder=self.search_hint, id="search", select_on_focus=False)
        with Container(id="found"):
            with Vertical(id="list"):
                yield Static(id="columns", markup=False)
                yield Static(id="said", markup=False)
                yield Rows(markup=False)
            with VerticalScroll(id="details", can_focus=False):
                yield Static(markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width >= DETAILS_MIN_COLUMNS, "-wide")

    def on_mount(self) -> None:
        self.list.loading = True
        self.search()

    @property
    def list(self) -> Rows:
        return self.query_one(Rows)

    @property
    def selected(self) -> Row | None:
        """The row that the cursor is on."""
        place = self.list.highlighted
        return self.shown_items[place] if place is not None else None

    @on(Input.Changed, "#search")
    def search(self) -> None:
        """Look for what the person has typed by now, unless the screen was left."""
        if not self.is_attached:
            return
        query = self.query_one(Search).value
        self.run_worker(lambda: self.run_search(query), thread=True, exclusive=True, group="find")

    def run_search(self, query: str) -> None:
        worker, rows, fault = get_current_worker(), (), None
        try:
            rows = self.find(query)
        except Exception as error:  # whatever it is, the screen says it and lives on
            fault = error
        if not worker.is_cancelled:
            self.app.call_from_thread(self.show_items, rows, fault)

    def show_items(self, rows: Sequence[Row], fault: Exception | None) -> None:
        if not self.is_attached:  # it was left meanwhile
            return
        self.items = rows
        self.list.loading = False
        said = printable(str(fault)) if fault else "" if rows else self.empty_text
        if len(rows) > MAX_ROWS:
            said = f"the first {MAX_ROWS} of {len(rows):,}; type more to find the others"
        note = self.query_one("#said", Static)
        note.update(said)
        note.display = bool(said)
        note.set_class(fault is not None, "fault")
        self.draw()

    @on(Rows.Resized)
    def draw(self) -> None:
        """Lay the rows out for the width that there is; the cursor stays where it was."""
        before, width = self.selected, self.list.scrollable_content_region.width
        if not width:  # not laid out yet
            return
        self.shown_items = self.items[:MAX_ROWS]
        self.query_one("#columns", Static).update(self.columns(width))
        self.list.set_options(self.item_line(row, width) for row in self.shown_items)
        if self.shown_items:
            self.list.highlighted = next((place for place, row in enumerate(self.shown_items) if row == before), 0)
        self.show_details()

    @on(OptionList.OptionHighlighted)
    def show_details(self) -> None:
        row = self.selected
        details = self.query_one("#details")
        details.display = row is not None
        if row is not None:
            details.query_one(Static).update(self.details(row))
            details.scroll_home(animate=False)
        self.refresh_bindings()

    async def action_move(self, how: str) -> None:
        """The list moves while its search is typed in."""
        await self.list.run_action(how)

    @on(Input.Submitted, "#search")
    @on(OptionList.OptionSelected)
    def choose_selected(self) -> None:
        if (row := self.selected) is not None:
            self.choose(row)
