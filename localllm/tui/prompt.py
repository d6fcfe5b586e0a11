"""The line that a person writes to the model."""

from pathlib import Path

from textual.message import Message
from textual.widgets import Input


class Prompt(Input):
    class Sent(Message):
        def __init__(self, text: str):
            super().__init__()
            self.text = text

    def __init__(self, history_file: Path):
        super().__init__(placeholder="Say something, or ? for help", id="prompt")
        self.history_file = history_file

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Sent(event.value))
        self.clear()
