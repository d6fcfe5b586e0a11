"""Conversations that are kept in a folder, one file each: listed, found again, searched, renamed, deleted.

Several processes may use the folder at once. Names are such that they sort by the time a conversation began, or
were given by a person; none is ever a path.
"""

import difflib
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.conversation import session_file
from localllm.conversation.session_file import SavedSession, SessionHeader
from localllm.conversation.turn import Turn
from localllm.errors import UsageError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
AUTOMATIC_NAME_PATTERN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
NEWEST = "last"  # names the one that changed last
EXCERPT_CHARACTERS = 40  # characters on each side of a word that was found
MAX_TITLE_CHARACTERS = 200  # characters
FileVersion = tuple[int, int]  # which file it is, and when it was written


@dataclass(frozen=True)
class SessionSummary:
    """A conversation in a list."""

    id: str
    header: SessionHeader | None  # None where the file is damaged
    nbytes: int
    error: str = ""

    @property
    def title(self) -> str:
        return self.header.title if self.header else "(damaged)"


@dataclass(frozen=True)
class SearchHit:
    """A conversation that has every word that was looked for, and the place that has most of them."""

    summary: SessionSummary
    question: int  # on its branch, from 1; 0: the title or the system prompt
    part: str  # title, system, question, file, thoughts or answer
    before: str
    match: str
    after: str


class SessionStore:
    def __init__(self, folder: Path):
        self.folder = folder

    def list(self) -> list[SessionSummary]:
        """Newest first; of each file the first line is read."""
        found = []
        for path in self.folder.glob("*.json") if self.folder.is_dir() else ():
            try:
                status = path.stat()
            except OSError:  # deleted meanwhile
                continue
            try:
                if not NAME_PATTERN.fullmatch(path.stem):
                    raise UsageError(f"{path.name!r} is no name for a conversation")
                summary = SessionSummary(path.stem, session_file.read_header(path), status.st_size)
            except UsageError as error:
                summary = SessionSummary(path.stem, None, status.st_size, error.message)
            found.append((summary.header.changed if summary.header else status.st_mtime, path.stem, summary))
        return [summary for *_, summary in sorted(found, key=lambda one: one[:2], reverse=True)]

    def resolve(self, name: str) -> str:
        """The whole name of the conversation that is called so, or alone begins so; `last` is the newest. Raises
        UsageError."""
        if name == NEWEST and not self.path(name).exists():
            newest = next((summary.id for summary in self.list() if summary.header), None)
            if newest is None:
                raise UsageError("no conversation is kept yet", "begin one with `localllm run MODEL`")
            return newest
        if self.path(name).exists():
            return name
        names = sorted(path.stem for path in self.folder.glob("*.json"))
        begins = [other for other in names if other.startswith(name)]
        if len(begins) == 1:
            return begins[0]
        if begins:
            raise UsageError(f"{len(begins)} conversations begin with {name}", f"they are {', '.join(begins[:5])}")
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "`localllm chats` lists them"
        raise UsageError(f"no conversation is kept as {name}", remedy)

    def path(self, name: str) -> Path:
        """Raises UsageError for what is no name."""
        if not NAME_PATTERN.fullmatch(name):
            raise UsageError(f"{name!r} is no name for a conversation", "use letters, digits, dots and dashes")
        return self.folder / f"{name}.json"

    def read(self, name: str) -> tuple[SavedSession, FileVersion | None]:
        """A conversation by its whole name, and which state of it that is. Raises UsageError."""
        stamp = self.file_version(name)
        return session_file.read(self.path(name)), stamp

    def file_version(self, name: str) -> FileVersion | None:
        try:
            status = self.path(name).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def save(
        self, session: SavedSession, name: str | None, expected_version: FileVersion | None
    ) -> tuple[str, FileVersion | None]:
        """Write it under its name, and give that; under a new one where it has none yet, or where another process
        has gone on with it: then stamp, that of the state this process knows, is another than the file's.

        Raises UsageError where it cannot be written.
        """
        from filelock import FileLock, Timeout  # 10 ms that those who only read need not wait for

        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / ".lock", timeout=5, mode=0o600):
                if name is None or self.file_version(name) not in (expected_version, None):
                    name = self._new_name(session.began)
                session_file.write(self.path(name), session)
                return name, self.file_version(name)
        except (OSError, Timeout) as error:
            raise UsageError(f"the conversation cannot be saved: {error}") from error

    def rename(self, name: str, title: str) -> None:
        """Give it another title. Raises UsageError."""
        name = self.resolve(name)
        conversation, stamp = self.read(name)
        self.save(replace(conversation, title=normalize_title(title)), name, stamp)

    def delete(self, name: str) -> str:
        """Gives its whole name. Raises UsageError."""
        name = self.resolve(name)
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"the conversation cannot be deleted: {error}") from error
        return name

    def search(self, words: str) -> Iterator[SearchHit]:
        """Conversations that have every word anywhere, as part of one or in capitals too; newest first, as they
        are found. Damaged files hold no words."""
        wanted = [word.lower() for word in words.split()]
        for summary in self.list() if wanted else ():
            if summary.header:
                try:
                    conversation = session_file.read(self.path(summary.id))
                except UsageError:  # damaged behind its first line, or deleted meanwhile
                    continue
                if hit := _search_hit(summary, conversation, wanted):
                    yield hit

    def _new_name(self, began: float) -> str:
        moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(began))
        while self.path(name := f"{moment}-{secrets.token_hex(3)}").exists():
            pass
        return name


def normalize_title(text: str) -> str:
    """One line. Raises UsageError where nothing is left, or too much."""
    title = " ".join(text.split())
    if not title or len(title) > MAX_TITLE_CHARACTERS:
        raise UsageError(f"a title has 1 to {MAX_TITLE_CHARACTERS} characters")
    return title


def _search_hit(summary: SessionSummary, conversation: SavedSession, wanted: Sequence[str]) -> SearchHit | None:
    missing, best, place = set(wanted), 0, None
    for turn, part, text in _searchable_texts(conversation):
        low = text.lower()
        here = [word for word in wanted if word in low]
        missing.difference_update(here)
        if len(here) > best:
            best, place = len(here), (turn, part, text, here[0])
    if missing or place is None:
        return None
    turn, part, text, word = place
    found = re.search(re.escape(word), text, re.IGNORECASE)
    begin, end = found.span() if found else (0, 0)
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
    """As a rule the title is the first question, which says more of the place: it comes last."""
    yield None, "system", conversation.system or ""
    for turn in conversation.root.descendants:
        yield turn, "question", turn.question
        yield turn, "answer", turn.answer
        yield turn, "thoughts", turn.thoughts
        for file in turn.attachments:
            yield turn, "file", f"{file.name}\n{file.text}"
    yield None, "title", conversation.title
