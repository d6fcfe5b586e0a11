"""A conversation and its file: saved with each question and answer, and continued later.

Used by both the line editor and the app. Independent of terminals.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock

from localllm.conversation.attach import escape_references, read_attachments
from localllm.conversation.chat import AnswerEvents, Chat, Turn
from localllm.conversation.model import Model
from localllm.conversation.session_file import SavedSession, to_text
from localllm.conversation.sessions import AUTOMATIC_NAME_PATTERN, FileVersion, SessionStore
from localllm.errors import UsageError


@dataclass
class Session:
    """A chat with its model and its file."""

    llm: Model
    chat: Chat
    folder: Path  # of saved conversations
    verbose: bool = False
    autosave: bool = True
    id: str | None = None  # name under which it is saved, if it is
    title: str = ""  # "" for the first question
    began: float = field(default_factory=time.time)
    editing: Turn | None = None  # the turn that the next message replaces
    file_version: FileVersion | None = None  # of the file when this process last accessed it
    saved_text: str = ""  # the file's contents, except for the time
    lock: RLock = field(default_factory=RLock, repr=False, compare=False)  # each answer is saved by its thread
    pending_notice: str = ""  # from a checkpoint, returned by the next `save`
    began_unanswered: bool = False  # the file was created for a question that has no answer yet

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
        """The content of the file, except for the time. Raises ValueError like `to_text`."""
        return to_text(SavedSession.from_chat(self.chat, self.title, self.began, self.began))

    def ask(self, text: str) -> AnswerEvents:
        """Answer a message, with the files it refers to.

        Raises UsageError if one cannot be attached, and the errors of `Chat.ask`.
        """
        message, attachments = read_attachments(text)
        turn, self.editing = self.editing, None
        if turn and turn.parent:
            return self.chat.edit(turn, message, attachments)
        return self.chat.ask(message, attachments=attachments)

    def edit(self, turn: Turn) -> str:
        """Let the next message replace this turn's; return that message as it would be typed."""
        self.editing = turn
        return escape_references(turn.question, turn.attachments)

    def save(self) -> str:
        """Write changes, if there are any turns; return a notice for the user, usually empty.

        Raises UsageError if it cannot be written.
        """
        with self.lock:
            notice, self.pending_notice = self.pending_notice, ""
            return self._save() or notice

    def checkpoint(self) -> None:
        """Save while an answer is under way, so that the question and the text so far survive a crash.

        If it cannot be written, `save` reports that after the answer.
        """
        with self.lock, suppress(UsageError):
            is_new = self.id is None
            self.pending_notice = self._save() or self.pending_notice
            self.began_unanswered = self.began_unanswered or (is_new and self.id is not None)

    def _save(self) -> str:
        if self.autosave and self.began_unanswered and self.id and not self.chat.root.children:
            self.store.delete(self.id)  # the first question got no answer
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
        previous_id = self.id
        self.id, self.file_version = self.store.save(self.snapshot, self.id, self.file_version)
        self.saved_text = content
        if previous_id and self.id != previous_id:
            return f"another process has continued {previous_id}; this conversation is saved as {self.id}"
        return ""

    def _adopt_title(self) -> None:
        """Adopt a title set by another process, which is not considered a conflicting change."""
        if self.id is None or self.store.file_version(self.id) in (self.file_version, None):
            return
        try:
            saved, version = self.store.read(self.id)
        except UsageError:  # damaged: left unchanged
            return
        if to_text(replace(saved, title=self.snapshot.title, changed=self.began)) == self.saved_text:
            self.title, self.file_version = saved.title, version
            self.saved_text = to_text(replace(saved, changed=self.began))

    def save_as(self, name: str) -> None:
        """Save under a name given by the user from now on; an automatic name is discarded.

        Raises UsageError if another conversation has that name, or it cannot be written.
        """
        path = self.store.path(name)
        if name != self.id and path.exists():
            raise UsageError(
                f"another conversation is saved as {name}", f"use another name, or `localllm chats --rm {name}`"
            )
        previous_id = self.id
        self.id, self.file_version = self.store.save(
            self.snapshot, name, self.file_version if name == previous_id else None
        )
        self.autosave, self.saved_text = True, ""
        if previous_id and previous_id != self.id and AUTOMATIC_NAME_PATTERN.fullmatch(previous_id):
            self.store.delete(previous_id)

    def load(self, name: str) -> SavedSession:
        """Continue a saved conversation; name: may be a unique prefix, or `last`. Raises UsageError."""
        sessions = self.store
        name = sessions.resolve(name)
        saved, version = sessions.read(name)
        self.save()
        saved.restore_into(self.chat)
        self.id, self.file_version, self.editing = name, version, None
        self.title, self.began, self.began_unanswered = saved.title, saved.began, False
        self.saved_text = self._current_text
        return saved

    def use_model(self, model: Model) -> None:
        """Switch to another model, and to its recommended parameters unless others were chosen."""
        if self.chat.params == self.llm.default_params:
            self.chat.params = model.default_params
        self.llm = self.chat.model = model

    def start_new(self) -> str | None:
        """Start a new conversation; return the name under which the previous one is saved, if it is."""
        self.save()
        previous_id = self.id
        self.chat.clear()
        self.id, self.file_version, self.editing, self.title, self.saved_text = None, None, None, "", ""
        self.began_unanswered = False
        self.began = time.time()
        return previous_id
