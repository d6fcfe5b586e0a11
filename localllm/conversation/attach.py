"""Files in a message: `@path` brings in a text file, and a path that was dropped on a terminal becomes `@path`.

    @notes.txt   @"two words.txt"   @two\\ words.txt   @~/notes.txt
    \\@notes.txt  is the text @notes.txt

What stands there and is no file stays text, so that addresses and names can be written as ever. Knows nothing of
terminals and models.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from localllm.conversation.fences import fence_text
from localllm.errors import UsageError
from localllm.formatting import format_bytes

MAX_FILE_BYTES = 2**20  # of a file: about 250,000 tokens, more than most contexts hold
MAX_PASTE_CHARACTERS = 10_000  # characters of a paste that may be paths
REFERENCE_PATTERN = re.compile(
    r"""(?<!\S)(?P<plain>\\)?@(?:"(?P<double>[^"\n]+)"|'(?P<single>[^'\n]+)'|(?P<bare>(?:\\.|\S)+))"""
)
TRAILING_PUNCTUATION = ".,;:!?)]}'\""
LANGUAGE_PATTERN = re.compile(r"[a-z0-9+]{1,12}")


@dataclass(frozen=True)
class Attachment:
    """A file as it was when it was asked about."""

    name: str  # as it was written
    text: str

    @property
    def prompt(self) -> str:
        """As a model reads it."""
        ending = Path(self.name).suffix.removeprefix(".").lower()
        return f"{self.name}:\n{fence_text(self.text, ending if LANGUAGE_PATTERN.fullmatch(ending) else '')}"


def prompt_with_files(text: str, attachments: tuple[Attachment, ...]) -> str:
    """What a model reads of a message: its files first, then what was written."""
    return "\n\n".join([*(file.prompt for file in attachments), text])


def read_attachments(text: str, folder: Path | None = None) -> tuple[str, tuple[Attachment, ...]]:
    """The message without its backslashes, and the files that it names, each once; folder: where paths begin, the
    working folder where it is None.

    Raises UsageError for a folder, and a file that is no text, too large or cannot be read.
    """
    found: dict[str, Attachment] = {}

    def read(match: re.Match[str]) -> str:
        if match["plain"]:
            return match[0][1:]
        for name in _candidate_names(match):
            if (path := _existing_path(name, folder)) is not None:
                found[name] = found.get(name) or Attachment(name, _read_text(name, path))
                break
        return match[0]

    written = REFERENCE_PATTERN.sub(read, text)
    return written, tuple(found.values())


def escape_references(text: str, attachments: tuple[Attachment, ...], folder: Path | None = None) -> str:
    """The message as it would be typed again: `attach` brings in what it brought in, where the files are there."""
    names = {file.name for file in attachments}

    def escape(match: re.Match[str]) -> str:
        if match["plain"]:
            return "\\" + match[0]
        meant = list(_candidate_names(match))
        is_text = not names.intersection(meant) and any(_existing_path(name, folder) is not None for name in meant)
        return "\\" + match[0] if is_text else match[0]

    return REFERENCE_PATTERN.sub(escape, text)


def file_reference(path: str) -> str:
    """How a path is written in a message."""
    if not re.search(r"[\s\\'\"]", path) and path[-1:] not in TRAILING_PUNCTUATION:
        return f"@{path}"
    return f'@"{path}"' if '"' not in path else f"@'{path}'"


def dropped_file_references(paste: str) -> str | None:
    """What stands for files that were dropped on a terminal or copied from a list of files: `@path`, with a space
    after each; None where the paste is anything else.

    Terminals write whole paths: with backslashes, between quotes, or as `file://` and what a URI makes of it.
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
    """What a reference may mean: at the end of a sentence, its full stop is none of the name's."""
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
    """A file or a folder."""
    try:
        path = Path(folder or ".", Path(name).expanduser())
        return path if path.is_file() or path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, with a zero in it, of a user that is not here
        return None


def _read_text(name: str, path: Path) -> str:
    if path.is_dir():
        raise UsageError(f"{name} is a folder", rf"name a file in it, or write \@{name} to mean the text")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror}", rf"or write \@{name} to mean the text"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{name} is larger than {format_bytes(MAX_FILE_BYTES)}", "bring in a part of it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{name} is no text in UTF-8", "bring in text files only")
    return text.replace("\r\n", "\n")


def _dropped_path(word: str) -> str | None:
    """The path of a file that is here, which a word gives whole."""
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
