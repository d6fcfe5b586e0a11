"""Where a conversation is to be written, as what, and how much of it. Nothing is overwritten unasked."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Input, Label, RadioButton, RadioSet, Static

from localllm.conversation.export import FORMATS, export_text
from localllm.conversation.session_file import SavedSession
from localllm.errors import LocalLLMError, UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import one_line, printable
from localllm.tui.dialogs import Confirm, Dialog

FORMAT_NAMES = {"md": "Markdown", "json": "JSON"}
MAX_NAME_CHARACTERS = 60  # characters of a name that is made from a title


class ExportScreen(Dialog[Path]):
    """Gives the file that was written.

    read: gives the conversation, on a thread; folder: where it is written, the current one where it is None.
    """

    DEFAULT_CSS = """
    ExportScreen {
        RadioSet { width: 100%; margin-bottom: 1; layout: horizontal; border: none; padding: 0; }
        RadioButton { margin-right: 3; }
        Label { color: $text-muted; }
    }
    """

    def __init__(self, read: Callable[[], SavedSession], title: str, folder: Path | None = None):
        super().__init__()
        self.read = read
        self.session_title = title
        self.folder = folder or Path.cwd()

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static("Export the conversation", classes="question", markup=False)
            with RadioSet(id="format", compact=True):
                for place, form in enumerate(FORMATS):
                    yield RadioButton(FORMAT_NAMES[form], value=not place, name=form, compact=True)
            with RadioSet(id="part", compact=True):
                yield RadioButton("this branch", value=True, compact=True)
                yield RadioButton("the whole tree", name="everything", compact=True)
            yield Label("file")
            yield Input(export_file_name(self.session_title, FORMATS[0]), select_on_focus=False)
            yield Static(classes="fault", markup=False)
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
        """The file ends as its format is called, whatever else a person has named it."""
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
        form, everything = self.file_format, self.all_branches

        def work() -> None:
            try:
                text = export_text(self.read(), form, all_branches=everything)
                write_user_file(path, text, overwrite=overwrite)
            except FileExistsError:
                then = partial(self.confirm_overwrite, path)
            except LocalLLMError as error:
                then = partial(self.show_error, str(error))
            else:
                then = partial(self.close_with, path)
            self.app.call_from_thread(self.run_if_attached, then)

        self.run_worker(work, thread=True, exclusive=True)

    def run_if_attached(self, then: Callable[[], None]) -> None:
        if self.is_attached:  # else the person has left it meanwhile
            then()

    def confirm_overwrite(self, path: Path) -> None:
        if path.is_dir():
            self.show_error(f"{path} is a folder")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.write(path, overwrite=True)

        self.app.push_screen(
            Confirm(f"{one_line(str(path))} is there already. Overwrite it?", "Overwrite"), answered
        )

    def show_error(self, fault: str) -> None:
        self.query_one(".fault", Static).update(printable(fault))

    def close_with(self, path: Path) -> None:
        self.notify(f"exported to {one_line(str(path))}", markup=False)
        self.dismiss(path)


def export_file_name(title: str, file_format: str) -> str:
    """Of the words of a title, without anything that a shell or a file system takes for something else."""
    words = "-".join(re.findall(r"\w+", title.lower()))[:MAX_NAME_CHARACTERS].strip("-_")
    return f"{words or 'conversation'}.{file_format}"
