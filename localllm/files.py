"""File access: JSON objects from untrusted files, atomic writes, and messages for disk errors."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from localllm.errors import DamagedModel, DiskFull, NotWritable, UsageError


def expand_path(path: str) -> Path:
    """Expand a leading `~`. Raises UsageError if the home folder is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = path.split("/", 1)[0]
        raise UsageError(f"the home folder {home} in {path} is unknown", "use a full path") from error


# Tokenizer files in order of preference: tokenizer.json alone defines every step, and if Mistral provides both
# others, tokenizer.model is outdated.
TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model")
LFS_POINTER = b"version https://git-lfs"
TOKEN_BYTES = 32  # of a token that machines share; a file has it in hexadecimal digits
MAX_JSON_BYTES = 64 * 2**20  # the largest real one, an index, has a few megabytes


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is no such file. Raises DamagedModel for anything else."""
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file(file, "it is larger than any configuration")
    return parse_json(file.read_bytes(), file)


def parse_json(content: bytes, file: PurePath) -> dict[str, Any]:
    """Parse an object; duplicate keys are rejected, since parsers treat them differently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise damaged_file(file, "it has a duplicate key")
        return fields

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged_file(file, f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged_file(file, "it does not hold a JSON object")
    return value


def parse_strict_json(content: str | bytes) -> Any:
    """Parse standard JSON: Python also accepts NaN, numbers out of range and lone surrogates, which cannot be
    written again. Raises ValueError and RecursionError.
    """

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is not a JSON number")
        return value

    value = json.loads(content, parse_float=number, parse_constant=number)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically: readers see either the old or the new one.

    Creates the folder, private to this user.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    import tempfile  # imported late: 10 ms that reading does not need

    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def write_token(file: Path) -> None:
    """Write a new token that only this user can read, unless the file exists."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError), open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
        out.write(os.urandom(TOKEN_BYTES).hex())  # as `secrets` does, without what it imports


def read_token(file: Path) -> bytes:
    """Return the token in a file, which `write_token` or the user has written. Raises UsageError for a file that
    others can read, or without a token."""
    try:
        mode, token = file.stat().st_mode, file.read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"cannot read the token in {file} ({error.strerror})", "copy the token file there"
        ) from None
    if mode & 0o077:
        raise UsageError(f"other users can read the token in {file}", f"run `chmod 600 {file}`")
    if len(token) < 2 * TOKEN_BYTES:
        raise UsageError(
            f"{file} has no token of {2 * TOKEN_BYTES} hexadecimal digits",
            f"run `openssl rand -hex {TOKEN_BYTES}`",
        )
    return token


def write_user_file(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file that a user named; overwrite: even if it exists.

    Raises FileExistsError, and UsageError if it cannot be written.
    """
    try:
        content = text.encode()  # before the file is created
        with path.open("wb" if overwrite else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"{path} cannot be written: {why}", "use another file") from error


def damaged_file(file: PurePath, why: str) -> DamagedModel:
    return DamagedModel(f"{file} is damaged: {why}", "fetch the model again")


def refuse_lfs_pointer(file: Path, first_bytes: bytes) -> None:
    """Raise DamagedModel if a weight file is only a Git LFS pointer.

    first_bytes: its first 8 bytes or more.
    """
    if len(first_bytes) >= 8 and first_bytes.startswith(LFS_POINTER[: len(first_bytes)]):
        raise damaged_file(file, "it is a Git LFS pointer, not the weights (`git lfs pull` fetches them)")


def reason_of(error: BaseException) -> str:
    """Return the system's message for an error, without its number."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def explain_disk_errors(
    folder: Path, remedy: str = "use a folder that can", *, resumable: bool = False
) -> Iterator[None]:
    """Translate errors of a disk into DiskFull and NotWritable.

    remedy: for the latter; resumable: whether the next run continues from what was written.
    """
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                again = "free some space, then run the same command again" + (": it resumes" if resumable else "")
                raise DiskFull(f"the disk with {folder} is full", again) from error
            case errno.EROFS | errno.EACCES | errno.EPERM:
                raise NotWritable(f"{folder} cannot be written ({error.strerror})", remedy) from error
        raise
