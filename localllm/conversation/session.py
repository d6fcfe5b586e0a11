"""A conversation as a person holds it: kept after each answer, gone on with later, its messages with files.

Both the line editor and the app have one. Knows nothing of terminals.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from localllm.conversation.attach import attach, typed
from localllm.conversation.chat import Chat, Events
from localllm.conversation.kept import Kept, text_of
from localllm.conversation.sessions import AUTOMATIC, Sessions, Stamp
from localllm.conversation.turn import Turn
from localllm.errors import UsageError
from localllm.model import Model


@dataclass
class Session:
    llm: Model
    chat: Chat
    chats: Path  # folder of kept conversations
    verbose: bool = False
    keeps: bool = True
    id: str | None = None  # the name that it is kept under, if it is
    title: str = ""  # "": from the first question
    began: float = field(default_factory=time.time)
    editing: Turn | None = None  # the turn that the next message takes the place of
    stamp: Stamp | None = None  # of the file as this process knows it
    kept: str = ""  # what the file holds, but for the time

    @property
    def sessions(self) -> Sessions:
        return Sessions(self.chats)

    @property
    def record(self) -> Kept:
        return Kept.of(self.chat, self.title, self.began, time.time())

    @property
    def _content(self) -> str:
        """What a file would hold, but for the time. Raises ValueError as `text_of`."""
        return text_of(Kept.of(self.chat, self.title, self.began, self.began))

    def ask(self, text: str) -> Events:
        """The answer to a message, with the files that it names. Raises UsageError where one cannot be brought in,
        and as `Chat.ask`."""
        written, attached = attach(text)
        turn, self.editing = self.editing, None
        if turn and turn.parent:
            return self.chat.edit(turn, written, attached)
        return self.chat.ask(written, attached=attached)

    def edit(self, turn: Turn) -> str:
        """The next message takes the place of this turn's; gives that, as it would be typed."""
        self.editing = turn
        return typed(turn.question, turn.attached)

    def keep(self) -> str:
        """Write what has changed, if anything was said; gives what a person should know, mostly nothing.

        Raises UsageError where it cannot be written.
        """
        if not self.keeps or not self.chat.root.children:
            return ""
        self._take_title()
        try:
            content = self._content
        except ValueError as error:
            raise UsageError(f"the conversation cannot be saved: {error}") from error
        if content == self.kept:
            return ""
        before = self.id
        self.id, self.stamp = self.sessions.keep(self.record, self.id, self.stamp)
        self.kept = content
        if before and self.id != before:
            return f"another process has gone on with {before}; this conversation is kept as {self.id}"
        return ""

    def _take_title(self) -> None:
        """Whoever gave the conversation another title meanwhile, here or elsewhere, has not gone on with it."""
        if self.id is None or self.sessions.stamp(self.id) in (self.stamp, None):
            return
        try:
            found, stamp = self.sessions.read(self.id)
        except UsageError:  # damaged: it is left as it is
            return
        if text_of(replace(found, title=self.record.title, changed=self.began)) == self.kept:
            self.title, self.stamp = found.title, stamp
            self.kept = text_of(replace(found, changed=self.began))

    def save(self, name: str) -> None:
        """Keep it under a name that a person gave, from now on; the name that it had by itself is given up.

        Raises UsageError where another conversation has that name, or it cannot be written.
        """
        path = self.sessions.path(name)
        if name != self.id and path.exists():
            raise UsageError(
                f"another conversation is kept as {name}", f"take another name, or `localllm chats --rm {name}`"
            )
        before = self.id
        self.id, self.stamp = self.sessions.keep(self.record, name, self.stamp if name == before else None)
        self.keeps, self.kept = True, ""
        if before and before != self.id and AUTOMATIC.fullmatch(before):
            self.sessions.delete(before)

    def load(self, name: str) -> Kept:
        """Go on with a kept conversation; name: also the begin of one, or `last`. Raises UsageError."""
        sessions = self.sessions
        name = sessions.find(name)
        found, stamp = sessions.read(name)
        self.keep()
        found.go_on(self.chat)
        self.id, self.stamp, self.editing = name, stamp, None
        self.title, self.began = found.title, found.began
        self.kept = self._content
        return found

    def go_on_with(self, model: Model) -> None:
        """Another model answers from now on, with the parameters that it recommends where nobody chose others."""
        if self.chat.params == self.llm.default_params:
            self.chat.params = model.default_params
        self.llm = self.chat.model = model

    def begin(self) -> str | None:
        """A new conversation; gives the name that the one so far stays kept under, if it is."""
        self.keep()
        before = self.id
        self.chat.clear()
        self.id, self.stamp, self.editing, self.title, self.kept = None, None, None, "", ""
        self.began = time.time()
        return before
