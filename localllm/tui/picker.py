"""A screen to choose one item of a list: type to search, arrows and the mouse move, Enter chooses.

Subclasses define the items and their appearance. Items are searched on a thread, since that may take a while.
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

Row = TypeVar("Row")
Chosen = TypeVar("Chosen")


class Search(Input):
    BINDING_GROUP_TITLE = "Lists"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "submit", "Choose", key_display="⏎")]


class Rows(OptionList):
    BINDING_GROUP_TITLE = "Lists"
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
        """The rows need a new layout."""

    def on_resize(self) -> None:
        self.post_message(self.Resized())


class Picker(Screen[Chosen], Generic[Row, Chosen]):
    AUTO_FOCUS: ClassVar[str | None] = "Search"
    BINDING_GROUP_TITLE = "Lists"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("up", "move('cursor_up')", "Move up", show=False),
        Binding("down", "move('cursor_down')", "Move down", show=False),
        Binding("pageup", "move('page_up')", "Page up", show=False),
        Binding("pagedown", "move('page_down')", "Page down", show=False),
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
        #results { height: 1fr; }
        #list { height: 1fr; width: 1fr; }
        #status { height: auto; max-height: 50%; padding: 0 1; display: none; }
        #details { height: auto; max-height: 8; padding: 0 1; border-top: solid $panel; }
        #status.error { color: $error; }
        &.-wide #results { layout: horizontal; }
        &.-wide #details { width: 52; height: 1fr; max-height: 100%; border-top: none; border-left: solid $panel; }
    }
    """
    title_text = ""
    search_hint = "type to search"
    empty_text = "no matches"

    def __init__(self) -> None:
        super().__init__()
        self.items: Sequence[Row] = ()
        self.shown_items: Sequence[Row] = ()

    def find(self, query: str) -> Sequence[Row]:
        """Return the items that match `query`. Called on a thread; an exception is shown in place of the list."""
        raise NotImplementedError

    def columns(self, width: int) -> str:
        """Return the header line of the list, "" for none."""
        return ""

    def item_line(self, row: Row, width: int) -> Content:
        """Return an item as one line of `width` cells."""
        raise NotImplementedError

    def details(self, row: Row) -> Content:
        """Return the description of the selected item."""
        raise NotImplementedError

    def choose(self, row: Row) -> None:
        """Act on the item that the user has chosen."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        yield Static(self.title_text, id="title", markup=False)
        yield Search(placeholder=self.search_hint, id="search", select_on_focus=False)
        with Container(id="results"):
            with Vertical(id="list"):
                yield Static(id="columns", markup=False)
                yield Static(id="status", markup=False)
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
        """The item under the cursor."""
        index = self.list.highlighted
        return self.shown_items[index] if index is not None else None

    @on(Input.Changed, "#search")
    def search(self) -> None:
        """Search for the text in the input on a thread, unless the screen is closed."""
        if not self.is_attached:
            return
        query = self.query_one(Search).value
        self.run_worker(lambda: self.run_search(query), thread=True, exclusive=True, group="find")

    def run_search(self, query: str) -> None:
        worker, rows, error = get_current_worker(), (), None
        try:
            rows = self.find(query)
        except Exception as caught:  # shown, whatever it is
            error = caught
        if not worker.is_cancelled:
            self.app.call_from_thread(self.show_items, rows, error)

    def show_items(self, rows: Sequence[Row], error: Exception | None) -> None:
        if not self.is_attached:  # the screen was closed meanwhile
            return
        self.items = rows
        self.list.loading = False
        message = printable(str(error)) if error else "" if rows else self.empty_text
        if len(rows) > MAX_ROWS:
            message = f"the first {MAX_ROWS} of {len(rows):,}; type to narrow the search"
        status = self.query_one("#status", Static)
        status.update(message)
        status.display = bool(message)
        status.set_class(error is not None, "error")
        self.draw()

    @on(Rows.Resized)
    def draw(self) -> None:
        """Lay out the rows for the current width, with the cursor on the same item as before."""
        previous, width = self.selected, self.list.scrollable_content_region.width
        if not width:  # before the first layout
            return
        self.shown_items = self.items[:MAX_ROWS]
        self.query_one("#columns", Static).update(self.columns(width))
        self.list.set_options(self.item_line(row, width) for row in self.shown_items)
        if self.shown_items:
            self.list.highlighted = next((i for i, row in enumerate(self.shown_items) if row == previous), 0)
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
        """Move in the list while the search input has the focus."""
        await self.list.run_action(how)

    @on(Input.Submitted, "#search")
    @on(OptionList.OptionSelected)
    def choose_selected(self) -> None:
        if (row := self.selected) is not None:
            self.choose(row)


MAX_ROWS = 200  # in the list, so that keys stay fast; searching finds the rest
DETAILS_MIN_COLUMNS = 110  # details are beside the list from this width on, otherwise below it


# Messages to the chat screen about a choice in a list or in the command palette.


class ModelChosen(Message):
    """Continue the conversation with this model."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class SessionChosen(Message):
    """Continue this saved conversation."""

    def __init__(self, id: str):
        super().__init__()
        self.id = id


class CommandChosen(Message):
    """Run this slash command; an incomplete one is put into the prompt for the user to complete."""

    def __init__(self, line: str, is_complete: bool):
        super().__init__()
        self.line = line
        self.is_complete = is_complete
