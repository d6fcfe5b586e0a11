"""Where a block of code is to be saved."""

from pathlib import Path

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from localllm.errors import UsageError
from localllm.paths import expand_path

TEXT_SUFFIX = ".txt"


def code_file_name(language: str) -> str:
    """A file's name as the language has it; language: as the model named it."""
    try:
        patterns = get_lexer_by_name(language).filenames
    except ClassNotFound:
        return "code" + TEXT_SUFFIX
    ending = Path(patterns[0]).suffix if patterns else ""
    return "code" + (ending if ending.removeprefix(".").isalnum() else TEXT_SUFFIX)


def code_file_path(written: str) -> Path:
    """Raises UsageError for what is no place for a file."""
    path = expand_path(written.strip())
    try:
        if path.is_dir():  # also no name at all: the folder that one is in
            raise UsageError(f"{path} is a folder", "name a file")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", "make it first")
    except OSError as error:
        raise UsageError(f"{path} cannot be looked for: {error.strerror}", "name another file") from error
    return path
