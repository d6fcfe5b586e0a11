"""A conversation on the screen: what was said above, the measurements below it, the prompt at the bottom."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Static

from localllm.conversation.chat import Chat, Events
from localllm.model import Model
from localllm.tui.answering import Answering, Watcher
from localllm.tui.prompt import Prompt
from localllm.tui.transcript.view import Transcript

FRAMES_PER_S = 30


class ChatScreen(Screen[None]):
    BINDINGS: ClassVar = [Binding("escape", "stop", "stop")]

    def __init__(self, model: Model, chat: Chat, home: Path):
        super().__init__()
        self.model = model
        self.chat = chat
        self.home = home
        self.answering: Answering | None = None
        self.transcript = Transcript(chat)
        self.watchers: list[Watcher] = [self.transcript]

    def compose(self) -> ComposeResult:
        head = f"{self.model.name} on {self.model.device}, context {self.model.context}"
        yield Static(head, id="head", markup=False)
        with Horizontal(id="middle"):
            yield self.transcript
        yield Prompt(self.home / "history")

    def on_mount(self) -> None:
        self.set_interval(1 / FRAMES_PER_S, self.draw)
        self.query_one(Prompt).focus()

    def on_prompt_sent(self, sent: Prompt.Sent) -> None:
        self.answer(sent.text, lambda: self.chat.ask(sent.text))

    def answer(self, question: str, ask: Callable[[], Events]) -> None:
        if self.answering:
            self.notify("an answer is under way; Escape stops it")
            return
        self.transcript.ask(question)
        self.answering = Answering(ask, self.chat.stop)
        for watcher in self.watchers:
            watcher.begin(self.answering.began)

    def draw(self) -> None:
        """Hand what came since the last frame to those who show it."""
        if not self.answering:
            return
        came, ended = self.answering.take()
        for watcher in self.watchers if came else ():
            watcher.follow(came)
        if ended:
            self.answering = None
            for watcher in self.watchers:
                watcher.end(ended)

    def action_stop(self) -> None:
        if self.answering:
            self.answering.stop()
