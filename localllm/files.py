"""Files of strangers: JSON that is bounded, an object, and has no key twice; and what is no file of weights.
Files of our own: written whole or not at all.
"""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from localllm.errors import DamagedModel, DiskFull, NotWritable, UsageError


# Paths as people write them.
def expand_path(path: str) -> Path:
    """With a home folder in place of its `~`. Raises UsageError where nobody knows which that is."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = path.split("/", 1)[0]
        raise UsageError(f"nobody knows which folder {home} of {path} is", "write the whole path") from error


# Where a folder has a tokenizer. The first that is there counts: tokenizer.json alone says every step, and where
# Mistral gives both others, tokenizer.model is the one it has left behind.
TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model")
LFS_POINTER = b"version https://git-lfs"
MAX_JSON_BYTES = 64 * 2**20  # bytes; the largest real one, an index, has a few megabytes


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no such file. Raises DamagedModel for anything else."""
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file(file, "it is larger than any configuration")
    return parse_json(file.read_bytes(), file)


def parse_json(content: bytes, file: PurePath) -> dict[str, Any]:
    """An object in which no key stands twice: what two readers understand differently is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise damaged_file(file, "a key stands in it twice")
        return fields

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged_file(file, f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged_file(file, "it does not hold a JSON object")
    return value


def parse_strict_json(content: str | bytes) -> Any:
    """JSON as its standard has it: Python reads NaN, numbers beyond all and halves of characters besides, which
    nothing can write again. Raises ValueError and RecursionError."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is no number of JSON")
        return value

    value = json.loads(content, parse_float=number, parse_constant=number)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def write_atomic(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of one. Makes the folder, for this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    import tempfile  # 10 ms that reading need not wait for

    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def write_user_file(path: Path, text: str, *, overwrite: bool) -> None:
    """A file that a person named; overwrite: also where one is there already.

    Raises FileExistsError, and UsageError where it cannot be written.
    """
    try:
        content = text.encode()  # before a file is begun
        with path.open("wb" if overwrite else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"{path} cannot be written: {why}", "name another file") from error


def damaged_file(file: PurePath, why: str) -> DamagedModel:
    return DamagedModel(f"{file} is damaged: {why}", "fetch the model again")


def refuse_lfs_pointer(file: Path, first_bytes: bytes) -> None:
    """Raises DamagedModel where a file of weights begins as what Git LFS leaves in its place.

    first_bytes: its first 8 bytes or more.
    """
    if len(first_bytes) >= 8 and first_bytes.startswith(LFS_POINTER[: len(first_bytes)]):
        raise damaged_file(file, "it is a Git LFS pointer, not the weights (`git lfs pull` gets them)")


@contextmanager
def explain_disk_errors(
    folder: Path, remedy: str = "name a folder that can", *, resumable: bool = False
) -> Iterator[None]:
    """Turns the faults of a disk into sentences: DiskFull, and NotWritable.

    remedy: its remedy; resumable: what is there already is found by the next run.
    """
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                again = "make room, then run the same command again" + (": it goes on" if resumable else "")
                raise DiskFull(f"the disk with {folder} is full", again) from error
            case errno.EROFS | errno.EACCES | errno.EPERM:
                raise NotWritable(f"{folder} cannot be written ({error.strerror})", remedy) from error
        raise
