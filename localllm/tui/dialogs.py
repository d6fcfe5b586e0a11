"""Modal dialogs: a yes/no question, and an input of one line. Escape cancels and returns None."""

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Button, Input, Static

from localllm.errors import LocalLLMError
from localllm.formatting import printable


class Dialog(ModalScreen[ScreenResultType]):
    BINDING_GROUP_TITLE = "Dialog"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]
    DEFAULT_CSS = """
    Dialog {
        align: center middle;
        & > VerticalScroll {
            width: 64;
            max-width: 90%;
            height: auto;
            max-height: 90%;
            padding: 1 2;
            background: $panel;
            border: round $primary;
        }
        .question { width: 100%; margin-bottom: 1; }
        .error { width: 100%; height: auto; color: $error; }
        Horizontal { height: auto; align-horizontal: right; }
        Button { margin-left: 2; }
    }
    """


class Confirm(Dialog[bool]):
    """Returns True for yes. The focus starts on no, so Enter alone changes nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n", "dismiss(False)", "No"),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, question: str, yes: str, no: str = "Cancel"):
        super().__init__()
        self.question = question
        self.labels = (no, yes)

    def compose(self) -> ComposeResult:
        no, yes = self.labels
        with VerticalScroll(can_focus=False):
            yield Static(self.question, classes="question", markup=False)
            with Horizontal():
                yield Button(no, id="no", compact=True)
                yield Button(yes, id="yes", variant="error", compact=True)

    @on(Button.Pressed)
    def answer(self, pressed: Button.Pressed) -> None:
        self.dismiss(pressed.button.id == "yes")


class LineInput(Dialog[str]):
    """Returns a line of text."""

    def __init__(self, question: str, text: str = "", check: Callable[[str], object] = lambda line: None):
        """text: initial text; check: raises LocalLLMError for an invalid line, which is shown until the line is
        valid
        """
        super().__init__()
        self.question = question
        self.text = text
        self.validate_line = check

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static(self.question, classes="question", markup=False)
            yield Input(self.text)
            yield Static(classes="error", markup=False)

    @on(Input.Submitted)
    def answer(self, submitted: Input.Submitted) -> None:
        try:
            self.validate_line(submitted.value)
        except LocalLLMError as error:
            self.query_one(".error", Static).update(printable(str(error)))
        else:
            self.dismiss(submitted.value)
