"""The settings panel beside the conversation: system prompt, thinking, and sampling parameters.

Changes apply from the next answer on. An invalid value is explained below its field, and the last valid one stays
in use.
"""

import dataclasses
import shlex
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Button, Input, Label, Select, Static, TextArea

from localllm.conversation.chat import Chat
from localllm.conversation.commands import value_to_text, with_parameter
from localllm.errors import LocalLLMError, UsageError
from localllm.formatting import one_line, printable
from localllm.sampling import PARAMETER_HELP, THINK_HELP

FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "stop",
)
HINT = "Applies from the next answer on. ● differs from the model's recommendation; Ctrl-R resets all."
TEMPLATE_DEFAULT, ON, OFF = "default", "on", "off"


class SettingsPanel(VerticalScroll):
    BINDING_GROUP_TITLE = "Settings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+r", "reset", "Reset")]
    DEFAULT_CSS = """
    SettingsPanel {
        width: 50%;
        max-width: 60;
        height: 1fr;
        padding: 0 1;
        border-left: solid $panel;
        scrollbar-size-vertical: 1;
        .title { text-style: bold; color: $primary; }
        .meaning { color: $text-muted; }
        #hint { margin-bottom: 1; }
        #system { height: 4; border: none; padding: 0 1; background: $surface; margin-bottom: 1; }
        #system:focus { background: $panel; }
        #think { height: auto; margin-bottom: 1; display: none; }
        #think Select { width: 100%; }
        Button { margin-bottom: 1; }
    }
    """

    def __init__(self, chat: Chat):
        super().__init__(id="settings", can_focus=False)
        self.chat = chat
        self.thinking_arguments: dict[str, dict[str, Any]] = {}  # template arguments for ON and OFF
        self.system_shown = ""

    def compose(self) -> ComposeResult:
        yield Label("Settings", classes="title")
        yield Static(HINT, id="hint", classes="meaning", markup=False)
        yield Label("system prompt")
        yield TextArea(id="system", compact=True, tab_behavior="focus", show_line_numbers=False)
        with Vertical(id="think"):
            yield Label("think")
            choices = [(word, word) for word in (TEMPLATE_DEFAULT, ON, OFF)]
            yield Select(choices, allow_blank=False, compact=True)
            yield Static(THINK_HELP, classes="meaning", markup=False)
        for field in FIELDS:
            yield Setting(self.chat, field)
        yield Button("Reset to recommended", compact=True, action="reset")

    def on_mount(self) -> None:
        if not self.chat.model.has_chat_template:
            system = self.query_one(TextArea)
            system.disabled = True
            # Content, because a string would be parsed as markup.
            system.placeholder = Content(f"{one_line(self.chat.model.name)} has no chat template for it")
        self.reload()
        self.run_worker(self.find_thinking_switch, thread=True)  # may send a request to a server

    @property
    def first_field(self) -> Widget:
        """The field to focus when the panel is opened."""
        system = self.query_one(TextArea)
        return self.query(Input).first() if system.disabled else system

    def on_show(self) -> None:
        self.reload()

    def reload(self) -> None:
        """Show the conversation's current settings, which commands may have changed."""
        self.system_shown = printable(self.chat.system or "")
        self.query_one(TextArea).text = self.system_shown
        for setting in self.query(Setting):
            setting.reload()
        self.show_thinking()

    def find_thinking_switch(self) -> None:
        """Show the thinking switch if the chat template has one."""
        try:
            arguments = {
                choice: self.chat.model.template_arguments({}, think=choice == ON) for choice in (ON, OFF)
            }
        except LocalLLMError:
            return
        self.app.call_from_thread(self.enable_thinking, arguments)

    def enable_thinking(self, arguments: dict[str, dict[str, Any]]) -> None:
        self.thinking_arguments = arguments
        if self.is_attached:  # not closed meanwhile
            self.query_one("#think").display = True
            self.show_thinking()

    def show_thinking(self) -> None:
        current = self.chat.template_arguments.items()
        choices = (choice for choice, arguments in self.thinking_arguments.items() if arguments.items() <= current)
        self.query_one(Select).value = next(choices, TEMPLATE_DEFAULT)

    @on(Select.Changed)
    def set_thinking(self, changed: Select.Changed) -> None:
        switch = self.thinking_arguments.get(str(changed.value), {})
        names = {name for arguments in self.thinking_arguments.values() for name in arguments}
        others = {name: value for name, value in self.chat.template_arguments.items() if name not in names}
        self.chat.template_arguments = others | switch

    @on(TextArea.Changed)
    def set_system_prompt(self, changed: TextArea.Changed) -> None:
        if changed.text_area.text != self.system_shown:
            self.system_shown = changed.text_area.text
            self.chat.system = self.system_shown if self.system_shown.strip() else None

    def action_reset(self) -> None:
        """Reset the sampling parameters to the model's recommendation; the system prompt stays."""
        self.chat.params = self.chat.model.default_params
        self.reload()


class Setting(Vertical):
    """An input for one field of SamplingParams; empty means the model's recommendation."""

    DEFAULT_CSS = """
    Setting {
        height: auto;
        margin-bottom: 1;
        Horizontal { height: 1; }
        Label { width: 20; }
        Input, Input:focus { width: 1fr; height: 1; border: none; padding: 0 1; background: $surface; }
        Input:focus { background: $panel; text-style: bold; }
        Input > .input--placeholder { color: $text-muted; }
        .meaning { color: $text-muted; height: auto; padding-left: 2; }
        .error { color: $error; height: auto; padding-left: 2; display: none; }
        &.-changed Label { color: $primary; text-style: bold; }
        &.-wrong .error { display: block; }
        &.-wrong .meaning { display: none; }
    }
    """

    def __init__(self, chat: Chat, field: str):
        super().__init__(id=field)
        self.chat = chat
        self.field = field
        self.shown_text = ""  # as set by the program, to recognize changes by the user

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(markup=False)
            yield Input()
        yield Static(classes="meaning", markup=False)
        yield Static(classes="error", markup=False)

    @property
    def recommended(self) -> Any:
        return getattr(self.chat.model.default_params, self.field)

    def reload(self) -> None:
        """Show the current value."""
        self.shown_text = value_to_text(getattr(self.chat.params, self.field))
        box = self.query_one(Input)
        box.value = self.shown_text
        box.placeholder = value_to_text(self.recommended) or "none"
        self.show_error("")

    def on_mount(self) -> None:
        self.reload()

    @on(Input.Changed)
    def change(self, changed: Input.Changed) -> None:
        changed.stop()
        if changed.value == self.shown_text:
            return
        self.shown_text = changed.value
        message = ""
        try:
            if text := changed.value.strip():
                self.chat.params = with_parameter(self.chat.params, self.field, split_value(self.field, text))
            else:
                self.chat.params = dataclasses.replace(self.chat.params, **{self.field: self.recommended})
        except UsageError as error:
            message = one_line(str(error))
        self.show_error(message)

    def show_error(self, message: str) -> None:
        """Show an error, "" for none, and whether the value in use differs from the recommendation."""
        differs = getattr(self.chat.params, self.field) != self.recommended
        self.set_class(differs, "-changed")
        self.set_class(bool(message), "-wrong")
        self.query_one(Label).update(("● " if differs else "  ") + self.field)
        recommended = f"Recommended: {value_to_text(self.recommended) or 'none'}. " if differs else ""
        self.query_one(".meaning", Static).update(recommended + PARAMETER_HELP[self.field])
        self.query_one(".error", Static).update(message)


def split_value(field: str, text: str) -> list[str]:
    """Split the text of a field into values: only `stop` has several, in quotes if they contain spaces, with \\n
    for a line break.

    Raises UsageError for an unclosed quote.
    """
    if field != "stop":
        return [text]
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    try:
        return [word.replace("\\n", "\n").replace("\\t", "\t") for word in words]
    except ValueError as error:
        raise UsageError(f"cannot read {text!r} ({error})", "close the quotes") from error
