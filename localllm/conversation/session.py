"""A conversation as a person holds it: kept from each question on, gone on with later, its messages with files.

Both the line editor and the app have one. Knows nothing of terminals.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock

from localllm.conversation.attach import escape_references, read_attachments
from localllm.conversation.chat import AnswerEvents, Chat
from localllm.conversation.session_file import SavedSession, to_text
from localllm.conversation.sessions import AUTOMATIC_NAME_PATTERN, FileVersion, SessionStore
from localllm.conversation.turn import Turn
from localllm.errors import UsageError
from localllm.protocol.model import Model


@dataclass
class Session:
    llm: Model
    chat: Chat
    folder: Path  # folder of kept conversations
    verbose: bool = False
    autosave: bool = True
    id: str | None = None  # the name that it is kept under, if it is
    title: str = ""  # "": from the first question
    began: float = field(default_factory=time.time)
    editing: Turn | None = None  # the turn that the next message takes the place of
    file_version: FileVersion | None = None  # of the file as this process knows it
    saved_text: str = ""  # what the file holds, but for the time
    lock: RLock = field(default_factory=RLock, repr=False, compare=False)  # each answer is saved by its thread
    untold: str = ""  # what a person should know of a checkpoint
    began_unanswered: bool = False  # the file was begun with a question that has no answer yet

    def __post_init__(self) -> None:
        self.chat.checkpoint = self.checkpoint

    @property
    def store(self) -> SessionStore:
        return SessionStore(self.folder)

    @property
    def snapshot(self) -> SavedSession:
        return SavedSession.from_chat(self.chat, self.title, self.began, time.time())

    @property
    def _current_text(self) -> str:
        """What a file would hold, but for the time. Raises ValueError as `text_of`."""
        return to_text(SavedSession.from_chat(self.chat, self.title, self.began, self.began))

    def ask(self, text: str) -> AnswerEvents:
        """The answer to a message, with the files that it names. Raises UsageError where one cannot be brought in,
        and as `Chat.ask`."""
        written, attached = read_attachments(text)
        turn, self.editing = self.editing, None
        if turn and turn.parent:
            return self.chat.edit(turn, written, attached)
        return self.chat.ask(written, attachments=attached)

    def edit(self, turn: Turn) -> str:
        """The next message takes the place of this turn's; gives that, as it would be typed."""
        self.editing = turn
        return escape_references(turn.question, turn.attachments)

    def save(self) -> str:
        """Write what has changed, if anything was said; gives what a person should know, mostly nothing.

        Raises UsageError where it cannot be written.
        """
        with self.lock:
            told, self.untold = self.untold, ""
            return self._save() or told

    def checkpoint(self) -> None:
        """Save while an answer is under way, so that whatever ends this process leaves the question and what was
        said. What keeps it from being saved is told by `save`, when the answer is there."""
        with self.lock, suppress(UsageError):
            begins = self.id is None
            self.untold = self._save() or self.untold
            self.began_unanswered = self.began_unanswered or (begins and self.id is not None)

    def _save(self) -> str:
        if self.autosave and self.began_unanswered and self.id and not self.chat.root.children:
            self.store.delete(self.id)  # the first question got no answer at all
            self.id, self.file_version, self.saved_text, self.began_unanswered = None, None, "", False
        if not self.autosave or not self.chat.root.children:
            return ""
        self._adopt_title()
        try:
            content = self._current_text
        except ValueError as error:
            raise UsageError(f"the conversation cannot be saved: {error}") from error
        if content == self.saved_text:
            return ""
        before = self.id
        self.id, self.file_version = self.store.save(self.snapshot, self.id, self.file_version)
        self.saved_text = content
        if before and self.id != before:
            return f"another process has gone on with {before}; this conversation is kept as {self.id}"
        return ""

    def _adopt_title(self) -> None:
        """Whoever gave the conversation another title meanwhile, here or elsewhere, has not gone on with it."""
        if self.id is None or self.store.file_version(self.id) in (self.file_version, None):
            return
        try:
            found, stamp = self.store.read(self.id)
        except UsageError:  # damaged: it is left as it is
            return
        if to_text(replace(found, title=self.snapshot.title, changed=self.began)) == self.saved_text:
            self.title, self.file_version = found.title, stamp
            self.saved_text = to_text(replace(found, changed=self.began))

    def save_as(self, name: str) -> None:
        """Keep it under a name that a person gave, from now on; the name that it had by itself is given up.

        Raises UsageError where another conversation has that name, or it cannot be written.
        """
        path = self.store.path(name)
        if name != self.id and path.exists():
            raise UsageError(
                f"another conversation is kept as {name}", f"take another name, or `localllm chats --rm {name}`"
            )
        before = self.id
        self.id, self.file_version = self.store.save(
            self.snapshot, name, self.file_version if name == before else None
        )
        self.autosave, self.saved_text = True, ""
        if before and before != self.id and AUTOMATIC_NAME_PATTERN.fullmatch(before):
            self.store.delete(before)

    def load(self, name: str) -> SavedSession:
        """Go on with a kept conversation; name: also the begin of one, or `last`. Raises UsageError."""
        sessions = self.store
        name = sessions.resolve(name)
        found, stamp = sessions.read(name)
        self.save()
        found.restore_into(self.chat)
        self.id, self.file_version, self.editing = name, stamp, None
        self.title, self.began, self.began_unanswered = found.title, found.began, False
        self.saved_text = self._current_text
        return found

    def use_model(self, model: Model) -> None:
        """Another model answers from now on, with the parameters that it recommends where nobody chose others."""
        if self.chat.params == self.llm.default_params:
            self.chat.params = model.default_params
        self.llm = self.chat.model = model

    def start_new(self) -> str | None:
        """A new conversation; gives the name that the one so far stays kept under, if it is."""
        self.save()
        before = self.id
        self.chat.clear()
        self.id, self.file_version, self.editing, self.title, self.saved_text = None, None, None, "", ""
        self.began_unanswered = False
        self.began = time.time()
        return before
