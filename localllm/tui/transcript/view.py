"""What was said, turn by turn, and the answer under way."""

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.widgets import Static

from localllm.conversation.chat import Chat
from localllm.request import Kind
from localllm.tui.answering import Came, Ended


class Transcript(VerticalScroll):
    def __init__(self, chat: Chat):
        super().__init__(id="transcript")
        self.chat = chat
        self.said = ""

    def ask(self, question: str) -> None:
        """Show a question whose answer is about to come."""
        self.said = ""
        self.mount(Static(f"> {question}", markup=False), Static("", markup=False, classes="answer"))

    def begin(self, began: float) -> None:
        self.anchor()

    def follow(self, came: Sequence[Came]) -> None:
        self.said += "".join(event.text for _, event in came if event.kind == Kind.CONTENT)
        self.query(Static).last().update(self.said)

    def end(self, ended: Ended) -> None:
        if ended.error:
            self.mount(Static(f"error: {ended.error}", markup=False))
