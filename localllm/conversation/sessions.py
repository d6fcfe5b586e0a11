"""Conversations saved in a folder, one file each: listed, loaded, searched, renamed, deleted.

Several processes may use the folder at once. Names are either automatic, sorting by the time a conversation began,
or given by the user; they are never paths.
"""

import difflib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.conversation import session_file
from localllm.conversation.chat import Turn
from localllm.conversation.session_file import SavedSession, SessionHeader
from localllm.errors import UsageError
from localllm.files import reason_of

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
AUTOMATIC_NAME_PATTERN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
NEWEST = "last"  # alias of the most recently changed one
EXCERPT_CHARACTERS = 40  # on each side of a match
MAX_TITLE_CHARACTERS = 200
FileVersion = tuple[int, int]  # inode, and modification time


@dataclass(frozen=True)
class SessionSummary:
    """A conversation in a list."""

    id: str
    header: SessionHeader | None  # None if the file is damaged
    nbytes: int
    error: str = ""

    @property
    def title(self) -> str:
        return self.header.title if self.header else "(damaged)"


@dataclass(frozen=True)
class SearchHit:
    """A conversation that contains all search words, and the text that contains most of them."""

    summary: SessionSummary
    question: int  # number on its branch, from 1; 0 for the title or the system prompt
    part: str  # title, system, question, file, thoughts or answer
    before: str
    match: str
    after: str


class SessionStore:
    """The conversations in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def list(self) -> list[SessionSummary]:
        """Return all conversations, newest first, reading only the first line of each file."""
        entries = []
        for path in self.folder.glob("*.json") if self.folder.is_dir() else ():
            try:
                status = path.stat()
            except OSError:  # deleted meanwhile
                continue
            try:
                if not NAME_PATTERN.fullmatch(path.stem):
                    raise UsageError(f"{path.name!r} is not a valid conversation name")
                summary = SessionSummary(path.stem, session_file.read_header(path), status.st_size)
            except UsageError as error:
                summary = SessionSummary(path.stem, None, status.st_size, error.message)
            entries.append((summary.header.changed if summary.header else status.st_mtime, path.stem, summary))
        return [summary for *_, summary in sorted(entries, key=lambda entry: entry[:2], reverse=True)]

    def resolve(self, name: str) -> str:
        """Return the full name of a conversation from its name or a unique prefix; `last` is the newest.

        Raises UsageError.
        """
        if name == NEWEST and not self.path(name).exists():
            newest = next((summary.id for summary in self.list() if summary.header), None)
            if newest is None:
                raise UsageError("no conversation is saved yet", "start one with `localllm run MODEL`")
            return newest
        if self.path(name).exists():
            return name
        names = sorted(path.stem for path in self.folder.glob("*.json"))
        matches = [other for other in names if other.startswith(name)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UsageError(
                f"{len(matches)} conversations begin with {name}", f"these match: {', '.join(matches[:5])}"
            )
        similar = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {similar[0]}?" if similar else "`localllm chats` lists them"
        raise UsageError(f"no conversation is saved as {name}", remedy)

    def path(self, name: str) -> Path:
        """Return the file of a name. Raises UsageError for an invalid name."""
        if not NAME_PATTERN.fullmatch(name):
            raise UsageError(f"{name!r} is not a valid conversation name", "use letters, digits, dots and dashes")
        return self.folder / f"{name}.json"

    def read(self, name: str) -> tuple[SavedSession, FileVersion | None]:
        """Return a conversation by its full name, and its file's version. Raises UsageError."""
        version = self.file_version(name)
        return session_file.read(self.path(name)), version

    def file_version(self, name: str) -> FileVersion | None:
        try:
            status = self.path(name).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def save(
        self, session: SavedSession, name: str | None, expected_version: FileVersion | None
    ) -> tuple[str, FileVersion | None]:
        """Save a conversation and return its name: a new one if it has none yet, or if another process has changed
        the file, so that its version is not `expected_version`.

        Raises UsageError if it cannot be written.
        """
        from filelock import FileLock, Timeout  # imported late: 10 ms that reading does not need

        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / ".lock", timeout=5, mode=0o600):
                if name is None or self.file_version(name) not in (expected_version, None):
                    name = self._new_name(session.began)
                session_file.write(self.path(name), session)
                return name, self.file_version(name)
        except (OSError, Timeout) as error:
            raise UsageError(f"the conversation cannot be saved: {reason_of(error)}") from error

    def rename(self, name: str, title: str) -> None:
        """Change the title. Raises UsageError."""
        name = self.resolve(name)
        conversation, version = self.read(name)
        self.save(replace(conversation, title=normalize_title(title)), name, version)

    def delete(self, name: str) -> str:
        """Delete a conversation and return its full name. Raises UsageError."""
        name = self.resolve(name)
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"the conversation cannot be deleted: {reason_of(error)}") from error
        return name

    def search(self, words: str) -> Iterator[SearchHit]:
        """Yield conversations that contain every word, as a substring in upper or lower case; newest first.

        Damaged files are skipped.
        """
        lowered = [word.lower() for word in words.split()]
        for summary in self.list() if lowered else ():
            if summary.header:
                try:
                    conversation = session_file.read(self.path(summary.id))
                except UsageError:  # damaged after its first line, or deleted meanwhile
                    continue
                if hit := _search_hit(summary, conversation, lowered):
                    yield hit

    def _new_name(self, began: float) -> str:
        timestamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(began))
        while self.path(name := f"{timestamp}-{os.urandom(3).hex()}").exists():
            pass
        return name


def normalize_title(text: str) -> str:
    """Return the title in one line. Raises UsageError if it is empty or too long."""
    title = " ".join(text.split())
    if not title or len(title) > MAX_TITLE_CHARACTERS:
        raise UsageError(f"a title has 1 to {MAX_TITLE_CHARACTERS} characters")
    return title


def _search_hit(summary: SessionSummary, conversation: SavedSession, words: Sequence[str]) -> SearchHit | None:
    """Return the text with the most words, None unless the conversation has all of them. words: in lower case"""
    missing, best, location = set(words), 0, None
    for turn, part, text in _searchable_texts(conversation):
        lowered = text.lower()
        matches = [word for word in words if word in lowered]
        missing.difference_update(matches)
        if len(matches) > best:
            best, location = len(matches), (turn, part, text, matches[0])
    if missing or location is None:
        return None
    turn, part, text, word = location
    match = re.search(re.escape(word), text, re.IGNORECASE)
    begin, end = match.span() if match else (0, 0)
    before, after = (
        _collapse_whitespace(text[max(0, begin - EXCERPT_CHARACTERS) : begin]),
        _collapse_whitespace(text[end : end + EXCERPT_CHARACTERS]),
    )
    before = before if begin <= EXCERPT_CHARACTERS else f"…{before.lstrip()}"
    after = after if end + EXCERPT_CHARACTERS >= len(text) else f"{after.rstrip()}…"
    return SearchHit(summary, turn.depth if turn else 0, part, before, text[begin:end], after)


def _collapse_whitespace(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _searchable_texts(conversation: SavedSession) -> Iterator[tuple[Turn | None, str, str]]:
    """Yield each text with its turn and part. The title is last: it usually equals the first question, which is a
    more precise location.
    """
    yield None, "system", conversation.system or ""
    for turn in conversation.root.descendants:
        yield turn, "question", turn.question
        yield turn, "answer", turn.answer
        yield turn, "thoughts", turn.thoughts
        for file in turn.attachments:
            yield turn, "file", f"{file.name}\n{file.text}"
    yield None, "title", conversation.title
