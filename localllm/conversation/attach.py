r"""Attaches files to a message: `@path` adds a text file, and a path dropped on a terminal becomes `@path`.

    @notes.txt   @"two words.txt"   @two\\ words.txt   @~/notes.txt
    \\@notes.txt  is the text @notes.txt

References that are not files remain text, so that addresses and names can be written as usual. Independent of
terminals and models.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from localllm.errors import UsageError
from localllm.formatting import fence_text, format_bytes

MAX_FILE_BYTES = 2**20  # per file: about 250,000 tokens, more than most contexts
MAX_PASTE_CHARACTERS = 10_000  # length of pasted text that may consist of paths
REFERENCE_PATTERN = re.compile(
    r"""(?<!\S)(?P<plain>\\)?@(?:"(?P<double>[^"\n]+)"|'(?P<single>[^'\n]+)'|(?P<bare>(?:\\.|\S)+))"""
)
TRAILING_PUNCTUATION = ".,;:!?)]}'\""
LANGUAGE_PATTERN = re.compile(r"[a-z0-9+]{1,12}")


@dataclass(frozen=True)
class Attachment:
    """A file's contents when the question was asked."""

    name: str  # as written in the message
    text: str

    @property
    def prompt(self) -> str:
        """The text given to the model."""
        ending = Path(self.name).suffix.removeprefix(".").lower()
        return f"{self.name}:\n{fence_text(self.text, ending if LANGUAGE_PATTERN.fullmatch(ending) else '')}"


def prompt_with_files(text: str, attachments: tuple[Attachment, ...]) -> str:
    """Return the text given to the model: attached files first, then the message."""
    return "\n\n".join([*(file.prompt for file in attachments), text])


def read_attachments(text: str, folder: Path | None = None) -> tuple[str, tuple[Attachment, ...]]:
    """Return the message without escape characters, and the files it refers to, each once; folder: base of
    relative paths, None for the working folder.

    Raises UsageError for a folder, and for a file that is not text, too large or unreadable.
    """
    attachments: dict[str, Attachment] = {}

    def read(match: re.Match[str]) -> str:
        if match["plain"]:
            return match[0][1:]
        for name in _candidate_names(match):
            if (path := _existing_path(name, folder)) is not None:
                attachments[name] = attachments.get(name) or Attachment(name, _read_text(name, path))
                break
        return match[0]

    message = REFERENCE_PATTERN.sub(read, text)
    return message, tuple(attachments.values())


def escape_references(text: str, attachments: tuple[Attachment, ...], folder: Path | None = None) -> str:
    """Return the message as it would be typed: `read_attachments` attaches the same files, if they exist."""
    names = {file.name for file in attachments}

    def escape(match: re.Match[str]) -> str:
        if match["plain"]:
            return "\\" + match[0]
        candidates = list(_candidate_names(match))
        is_text = not names.intersection(candidates) and any(
            _existing_path(name, folder) is not None for name in candidates
        )
        return "\\" + match[0] if is_text else match[0]

    return REFERENCE_PATTERN.sub(escape, text)


def file_reference(path: str) -> str:
    """Return the reference for a path in a message."""
    if not re.search(r"[\s\\'\"]", path) and path[-1:] not in TRAILING_PUNCTUATION:
        return f"@{path}"
    return f'@"{path}"' if '"' not in path else f"@'{path}'"


def dropped_file_references(paste: str) -> str | None:
    """Return references for files dropped on a terminal or copied from a file manager: `@path`, each followed by a
    space; None for any other paste.

    Terminals write absolute paths: with backslashes, in quotes, or as a `file://` URI.
    """
    text = paste.strip()
    if len(text) > MAX_PASTE_CHARACTERS or not text.startswith(("/", "~/", "'", '"', "file://")):
        return None
    try:
        words = [text] if _dropped_path(text) else shlex.split(text)
    except ValueError:
        return None
    paths = [_dropped_path(word) for word in words]
    if not paths or None in paths:
        return None
    return "".join(f"{file_reference(path)} " for path in paths if path)


def _candidate_names(match: re.Match[str]) -> Iterator[str]:
    """Yield possible file names of a reference: trailing punctuation may belong to the sentence."""
    if (quoted := match["double"] or match["single"]) is not None:
        yield quoted
        return
    bare = re.sub(r"\\(.)", r"\1", match["bare"])
    yield bare
    while bare[-1:] and bare[-1] in TRAILING_PUNCTUATION:
        bare = bare[:-1]
        if bare:
            yield bare


def _existing_path(name: str, folder: Path | None) -> Path | None:
    """Return a file's or folder's path if it exists."""
    try:
        path = Path(folder or ".", Path(name).expanduser())
        return path if path.is_file() or path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, with a null byte, or of an unknown user
        return None


def _read_text(name: str, path: Path) -> str:
    if path.is_dir():
        raise UsageError(f"{name} is a folder", rf"use a file in it, or write \@{name} for plain text")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror}", rf"or write \@{name} for plain text"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{name} is larger than {format_bytes(MAX_FILE_BYTES)}", "attach a part of it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{name} is not UTF-8 text", "attach text files only")
    return text.replace("\r\n", "\n")


def _dropped_path(word: str) -> str | None:
    """Return the path of an existing file, if the word is its absolute path."""
    if word.startswith("file://"):
        try:
            uri = urlsplit(word)
        except ValueError:
            return None
        if uri.netloc not in ("", "localhost"):
            return None
        word = unquote(uri.path)
    if not word.startswith(("/", "~/")) or "\n" in word:
        return None
    path = _existing_path(word, None)
    return word if path is not None and path.is_file() else None
