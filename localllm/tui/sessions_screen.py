"""The list of saved conversations, newest first: search, continue, rename, delete and export them."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, RadioButton, RadioSet, Static
from textual.worker import get_current_worker

from localllm.conversation.export import FORMATS, export_text
from localllm.conversation.session_file import SavedSession
from localllm.conversation.sessions import SearchHit, SessionStore, SessionSummary, normalize_title
from localllm.errors import LocalLLMError, UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import format_bytes, one_line, printable
from localllm.tui.dialogs import Confirm, Dialog, LineInput
from localllm.tui.drawing import align_left, align_right, truncate
from localllm.tui.picker import MAX_ROWS, Picker

FORMAT_NAMES = {"md": "Markdown", "json": "JSON"}
MAX_NAME_CHARACTERS = 60  # of a file name from a title

COLUMN_WIDTHS = (17, 5, 18)  # time, number of questions, model

COLUMN_ALIGNMENTS = (align_left, align_right, align_left)


@dataclass(frozen=True)
class SessionItem:
    """A conversation in the list."""

    summary: SessionSummary
    hit: SearchHit | None = None  # match of the search, None without one


class SessionsScreen(Picker[SessionItem, str]):
    """Returns the id of the conversation to continue, None if none was chosen."""

    title_text = "Conversations"
    search_hint = "type words to search for …"
    empty_text = "no matching conversations"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "rename", "Rename"),
        Binding("ctrl+s", "export", "Export"),
        Binding("ctrl+x", "delete", "Delete", priority=True),
    ]

    def __init__(self, sessions: SessionStore):
        super().__init__()
        self.store = sessions

    def find(self, query: str) -> Sequence[SessionItem]:
        if not query.split():
            return [SessionItem(summary) for summary in self.store.list()]
        worker, items = get_current_worker(), []
        for hit in islice(self.store.search(query), MAX_ROWS + 1):
            items.append(SessionItem(hit.summary, hit))
            if worker.is_cancelled:  # a newer search has begun
                break
        return items

    def columns(self, width: int) -> str:
        changed, questions, model = COLUMN_WIDTHS
        return (
            align_left("changed", changed)
            + align_right("turns", questions)
            + "  "
            + align_left("model", model)
            + " title"
        )

    def item_line(self, row: SessionItem, width: int) -> Content:
        header = row.summary.header
        values = (_format_time(header.changed), str(header.questions), header.model) if header else ("-", "-", "-")
        changed, questions, model = (
            align(text, cells) for align, text, cells in zip(COLUMN_ALIGNMENTS, values, COLUMN_WIDTHS, strict=True)
        )
        columns = changed + questions + "  " + model + " "
        return Content(columns + truncate(row.summary.title, width - sum(COLUMN_WIDTHS) - 3))

    def details(self, row: SessionItem) -> Content:
        summary, header = row.summary, row.summary.header
        lines = [Content.styled(truncate(summary.title, 400), "bold")]
        if header is None:
            lines.append(Content.styled(truncate(summary.error, 1000), "$error"))
        else:
            model, began = truncate(header.model, 200), _format_time(header.began)
            lines.append(Content(f"{header.questions} questions to {model}, begun {began}"))
        if hit := row.hit:
            where = f"question {hit.question}, {hit.part}: " if hit.question else f"{hit.part}: "
            before, match, after = map(one_line, (hit.before, hit.match, hit.after))
            lines.append(Content.assemble((where, "$text-muted"), before, (match, "bold underline"), after))
        lines.append(Content.styled(f"{one_line(summary.id)}, {format_bytes(summary.nbytes)}", "$text-muted"))
        return Content("\n").join(lines)

    def choose(self, row: SessionItem) -> None:
        if row.summary.header is None:
            self.notify(one_line(row.summary.error), severity="error", markup=False)
            return
        self.dismiss(row.summary.id)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow only deletion for a damaged file; None shows an action as disabled."""
        if action not in ("rename", "export", "delete"):
            return True
        return True if self.selected and (action == "delete" or self.selected.summary.header) else None

    def action_rename(self) -> None:
        if not (row := self.selected):
            return
        name = row.summary.id

        def rename(title: str | None) -> None:
            if title is not None:
                self.run_change(lambda: self.store.rename(name, title))

        self.app.push_screen(LineInput("New title", one_line(row.summary.title), normalize_title), rename)

    def action_delete(self) -> None:
        if not (row := self.selected):
            return
        name = row.summary.id

        def delete(yes: bool | None) -> None:
            if yes:
                self.run_change(lambda: self.store.delete(name))

        question = f"Delete “{truncate(row.summary.title, 120)}”? This cannot be undone."
        self.app.push_screen(Confirm(question, "Delete", "Keep"), delete)

    def action_export(self) -> None:
        if row := self.selected:
            name = row.summary.id
            self.app.push_screen(ExportScreen(lambda: self.store.read(name)[0], row.summary.title))

    def run_change(self, change: Callable[[], object]) -> None:
        """Run a change of the saved conversations on a thread, show any error, and update the list."""

        def run() -> None:
            try:
                change()
            except LocalLLMError as error:
                self.app.call_from_thread(self.notify, one_line(str(error)), severity="error", markup=False)
            self.app.call_from_thread(self.search)

        self.run_worker(run, thread=True, group="change")


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


class ExportScreen(Dialog[Path]):
    """Asks for a file, a format and a part of a conversation, and returns the path of the exported file."""

    DEFAULT_CSS = """
    ExportScreen {
        RadioSet { width: 100%; margin-bottom: 1; layout: horizontal; border: none; padding: 0; }
        RadioButton { margin-right: 3; }
        Label { color: $text-muted; }
    }
    """

    def __init__(self, read: Callable[[], SavedSession], title: str, folder: Path | None = None):
        """read: returns the conversation, called on a thread; folder: base of relative paths, None for the working
        folder
        """
        super().__init__()
        self.read = read
        self.session_title = title
        self.folder = folder or Path.cwd()

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static("Export the conversation", classes="question", markup=False)
            with RadioSet(id="format", compact=True):
                for i, file_format in enumerate(FORMATS):
                    yield RadioButton(FORMAT_NAMES[file_format], value=i == 0, name=file_format, compact=True)
            with RadioSet(id="part", compact=True):
                yield RadioButton("this branch", value=True, compact=True)
                yield RadioButton("all branches", name="everything", compact=True)
            yield Label("file")
            yield Input(export_file_name(self.session_title, FORMATS[0]), select_on_focus=False)
            yield Static(classes="error", markup=False)
            with Horizontal():
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Export", id="export", variant="primary", compact=True)

    @property
    def file_format(self) -> str:
        pressed = self.query_one("#format", RadioSet).pressed_button
        return (pressed and pressed.name) or FORMATS[0]

    @property
    def all_branches(self) -> bool:
        pressed = self.query_one("#part", RadioSet).pressed_button
        return pressed is not None and pressed.name == "everything"

    @on(RadioSet.Changed, "#format")
    def update_suffix(self) -> None:
        """Change the suffix of the file name to that of the chosen format."""
        box = self.query_one(Input)
        stem, dot, ending = box.value.rpartition(".")
        if dot and ending in FORMATS:
            box.value = f"{stem}.{self.file_format}"

    @on(Button.Pressed)
    @on(Input.Submitted)
    def press(self, event: Button.Pressed | Input.Submitted) -> None:
        if isinstance(event, Button.Pressed) and event.button.id == "cancel":
            self.dismiss(None)
            return
        name = self.query_one(Input).value.strip()
        if not name:
            self.show_error("the file needs a name")
            return
        try:
            path = self.folder / expand_path(name)
        except UsageError as error:
            self.show_error(str(error))
        else:
            self.write(path, overwrite=False)

    def write(self, path: Path, *, overwrite: bool) -> None:
        file_format, all_branches = self.file_format, self.all_branches

        def export() -> None:
            try:
                text = export_text(self.read(), file_format, all_branches=all_branches)
                write_user_file(path, text, overwrite=overwrite)
            except FileExistsError:
                then = partial(self.confirm_overwrite, path)
            except LocalLLMError as error:
                then = partial(self.show_error, str(error))
            else:
                then = partial(self.close_with, path)
            self.app.call_from_thread(self.run_if_attached, then)

        self.run_worker(export, thread=True, exclusive=True)

    def run_if_attached(self, then: Callable[[], None]) -> None:
        if self.is_attached:  # not closed meanwhile
            then()

    def confirm_overwrite(self, path: Path) -> None:
        if path.is_dir():
            self.show_error(f"{path} is a folder")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.write(path, overwrite=True)

        self.app.push_screen(
            Confirm(f"{one_line(str(path))} already exists. Overwrite it?", "Overwrite"), answered
        )

    def show_error(self, message: str) -> None:
        self.query_one(".error", Static).update(printable(message))

    def close_with(self, path: Path) -> None:
        self.notify(f"exported to {one_line(str(path))}", markup=False)
        self.dismiss(path)


def export_file_name(title: str, file_format: str) -> str:
    """Return a file name from the words of a title, without special characters of shells and file systems."""
    words = "-".join(re.findall(r"\w+", title.lower()))[:MAX_NAME_CHARACTERS].strip("-_")
    return f"{words or 'conversation'}.{file_format}"
