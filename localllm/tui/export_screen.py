"""Where a conversation is to be written, as what, and how much of it. Nothing is overwritten unasked."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Input, Label, RadioButton, RadioSet, Static

from localllm.conversation.export import FORMATS, exported
from localllm.conversation.kept import Kept
from localllm.errors import LocalLLMError, UsageError
from localllm.files import write_named
from localllm.paths import expanded
from localllm.tui.dialogs import Confirm, Dialog
from localllm.visible import one_line, visible

CALLED = {"md": "Markdown", "json": "JSON"}
LONGEST_NAME = 60  # characters of a name that is made from a title


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

    def __init__(self, read: Callable[[], Kept], title: str, folder: Path | None = None):
        super().__init__()
        self.read = read
        self.title_of_it = title
        self.folder = folder or Path.cwd()

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static("Export the conversation", classes="question", markup=False)
            with RadioSet(id="format", compact=True):
                for place, form in enumerate(FORMATS):
                    yield RadioButton(CALLED[form], value=not place, name=form, compact=True)
            with RadioSet(id="part", compact=True):
                yield RadioButton("this branch", value=True, compact=True)
                yield RadioButton("the whole tree", name="everything", compact=True)
            yield Label("file")
            yield Input(file_name(self.title_of_it, FORMATS[0]), select_on_focus=False)
            yield Static(classes="fault", markup=False)
            with Horizontal():
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Export", id="export", variant="primary", compact=True)

    @property
    def form(self) -> str:
        pressed = self.query_one("#format", RadioSet).pressed_button
        return (pressed and pressed.name) or FORMATS[0]

    @property
    def everything(self) -> bool:
        pressed = self.query_one("#part", RadioSet).pressed_button
        return pressed is not None and pressed.name == "everything"

    @on(RadioSet.Changed, "#format")
    def rename(self) -> None:
        """The file ends as its format is called, whatever else a person has named it."""
        box = self.query_one(Input)
        stem, dot, ending = box.value.rpartition(".")
        if dot and ending in FORMATS:
            box.value = f"{stem}.{self.form}"

    @on(Button.Pressed)
    @on(Input.Submitted)
    def press(self, event: Button.Pressed | Input.Submitted) -> None:
        if isinstance(event, Button.Pressed) and event.button.id == "cancel":
            self.dismiss(None)
            return
        name = self.query_one(Input).value.strip()
        if not name:
            self.tell("the file needs a name")
            return
        try:
            path = self.folder / expanded(name)
        except UsageError as error:
            self.tell(str(error))
        else:
            self.write(path, overwrite=False)

    def write(self, path: Path, *, overwrite: bool) -> None:
        form, everything = self.form, self.everything

        def work() -> None:
            try:
                text = exported(self.read(), form, everything=everything)
                write_named(path, text, replace=overwrite)
            except FileExistsError:
                then = partial(self.ask, path)
            except LocalLLMError as error:
                then = partial(self.tell, str(error))
            else:
                then = partial(self.done, path)
            self.app.call_from_thread(self.finish, then)

        self.run_worker(work, thread=True, exclusive=True)

    def finish(self, then: Callable[[], None]) -> None:
        if self.is_attached:  # else the person has left it meanwhile
            then()

    def ask(self, path: Path) -> None:
        if path.is_dir():
            self.tell(f"{path} is a folder")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.write(path, overwrite=True)

        self.app.push_screen(
            Confirm(f"{one_line(str(path))} is there already. Overwrite it?", "Overwrite"), answered
        )

    def tell(self, fault: str) -> None:
        self.query_one(".fault", Static).update(visible(fault))

    def done(self, path: Path) -> None:
        self.notify(f"exported to {one_line(str(path))}", markup=False)
        self.dismiss(path)


def file_name(title: str, form: str) -> str:
    """Of the words of a title, without anything that a shell or a file system takes for something else."""
    words = "-".join(re.findall(r"\w+", title.lower()))[:LONGEST_NAME].strip("-_")
    return f"{words or 'conversation'}.{form}"
