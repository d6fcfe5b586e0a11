"""Weights that `--keep-layout` keeps on disk as CPU kernels read them: <cache>/layouts/MODEL-LAYOUT.weights.

MODEL is a digest of the model's files, LAYOUT one of the code that lays weights out. A file that is being written
ends in `.partial` and is never used. `runtime/kept_weights.py` reads and writes them. No torch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UsageError
from localllm.files import parse_json
from localllm.hub.names import RepoName

FOLDER, SUFFIX, PARTIAL_SUFFIX, LOCK_SUFFIX = "layouts", ".weights", ".partial", ".lock"
DIGEST_LENGTH = 24  # characters of each digest in a file's name
PAGE_BYTES = 4096  # alignment of parts, and the bytes that each have a checksum
# A file ends with its index, the index's SHA-256 and length, and this.
MAGIC = b"localllm kept layout 1\n\0"
TRAILER_BYTES = 32 + 8 + len(MAGIC)
MAX_INDEX_BYTES = 2**28


@dataclass(frozen=True)
class KeptIndex:
    """The index of a file: its weights by key, as JSON values, and the digest of its pages' checksums."""

    source: str  # path of the model that it was made from
    weights: dict[str, Any]
    checksum: str
    data_bytes: int  # before the index, whole pages


@dataclass(frozen=True)
class KeptFile:
    """A file of laid-out weights."""

    path: Path

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def remove(self) -> int:
        """Delete it, and return the bytes freed. Processes that have mapped it are not disturbed.

        Raises UsageError if it is being written, and LocalLLMError if it cannot be deleted.
        """
        with writing(self.path) as is_free:
            if not is_free:
                raise UsageError(
                    f"another process is writing {self.path}", "wait until it has finished, or stop it"
                )
            freed = self.nbytes
            try:
                self.path.unlink()
            except OSError as error:
                raise LocalLLMError(
                    f"{self.path} cannot be removed ({error.strerror})", "check its permissions"
                ) from error
        return freed


def model_key(model: Path) -> str:
    """Return the digest of the files of a model that affect its weights.

    Large files that are not from the Hub are identified by samples of their content, size and time.
    """
    from localllm.checkpoint.digest import digest_model  # weights are read without the Hub's library

    folder = model.parent if model.is_file() else model
    lines = [
        f"{file.path} {file.size} {file.sha256 or (file.samples, (folder / file.path).stat().st_mtime_ns)}\n"
        for file in digest_model(model)
        if file.affects_logits
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:DIGEST_LENGTH]


def kept_path(cache: Path, model: str, layout: str) -> Path:
    """Return the path of a model's file, which may not exist. model, layout: digests"""
    return cache / FOLDER / f"{model}-{layout[:DIGEST_LENGTH]}{SUFFIX}"


def kept_files(cache: Path, model: Path) -> list[KeptFile]:
    """Return a model's files, also of other versions of localllm; none if its weights cannot be read."""
    if not has_files(cache):
        return []
    try:
        return files_by_key(cache, model_key(model))
    except (LocalLLMError, OSError):
        return []


def has_files(cache: Path) -> bool:
    """Return whether there are files of any model, so that a model's digest is needed."""
    return any((cache / FOLDER).glob(f"*{SUFFIX}"))


def files_by_key(cache: Path, key: str) -> list[KeptFile]:
    return [KeptFile(path) for path in sorted((cache / FOLDER).glob(f"{key}-*{SUFFIX}"))]


def kept_files_of(repo: RepoName, removed: Iterable[str], cache: Path) -> list[KeptFile]:
    """Return the files of a download that is to be removed, unless its weights stay. removed: paths of files"""
    if not any(name.endswith((".safetensors", ".gguf")) for name in removed):
        return []
    from localllm.hub.resolve import model_in_cache  # as above

    try:
        path = model_in_cache(repo)
    except ModelNotFound:  # it is incomplete, or there are several
        return []
    return kept_files(cache, path) if path else []


def orphaned_files(cache: Path) -> Iterator[KeptFile]:
    """Iterate over files whose model no longer exists."""
    for path in sorted((cache / FOLDER).glob(f"*{SUFFIX}")):
        with suppress(DamagedModel, OSError):
            if not Path(read_index(path).source).exists():
                yield KeptFile(path)


@contextmanager
def writing(path: Path) -> Iterator[bool]:
    """Hold a file's lock while it is written or removed. Yields False if another process holds it."""
    from filelock import FileLock, Timeout  # not needed to look for files

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(path.with_suffix(LOCK_SUFFIX))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def format_index(index: KeptIndex) -> bytes:
    """Return the end of a file, which follows its data."""
    fields = {"source": index.source, "weights": index.weights, "checksum": index.checksum}
    content = json.dumps(fields).encode()
    return content + hashlib.sha256(content).digest() + len(content).to_bytes(8, "little") + MAGIC


def read_index(path: Path) -> KeptIndex:
    """Read the index of a file. Raises DamagedModel if it is not what was written, and OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < TRAILER_BYTES:
            raise damaged(path)
        file.seek(size - TRAILER_BYTES)
        trailer = file.read(TRAILER_BYTES)
        length = int.from_bytes(trailer[32:40], "little")
        if trailer[40:] != MAGIC or length > min(MAX_INDEX_BYTES, size - TRAILER_BYTES):
            raise damaged(path)
        data_bytes = size - TRAILER_BYTES - length
        file.seek(data_bytes)
        content = file.read(length)
    if hashlib.sha256(content).digest() != trailer[:32] or data_bytes % PAGE_BYTES:
        raise damaged(path)
    fields = parse_json(content, path)
    return KeptIndex(fields["source"], fields["weights"], fields["checksum"], data_bytes)


def damaged(path: Path) -> DamagedModel:
    return DamagedModel(
        f"{path}, the kept layout of this model, is damaged and was not used",
        "load the model with --keep-layout to write it again",
    )
