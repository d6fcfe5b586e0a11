"""The models that `--quant` has quantized: <home>/quantized/SOURCE/QUANT, each tied to its exact source weights.

A folder that is being written ends in `.partial` and is never used. No torch.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from localllm.errors import DamagedModel, DiskFull, LocalLLMError, ModelNotFound, UsageError
from localllm.files import explain_disk_errors, read_json
from localllm.formatting import format_bytes
from localllm.quantize.source import PARTIAL_SUFFIX, RECIPE_FILE, Recipe, source_identity

DRAFT_SUFFIX = ".draft"  # suffix of a file that is being written
RECIPES = {"int8": Recipe("rtn", 8, None), "int4": Recipe("rtn", 4, 128)}
QUANTIZED_FOLDER, LOCKS = "quantized", ".locks"
DIGEST_LENGTH = 12  # characters of a digest or a commit: enough to distinguish a user's models
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class StoredArtefact:
    """An artefact, or an incomplete one that an interrupted run left."""

    source: str  # ORG/REPO, or the path of a folder
    quant: str
    path: Path
    complete: bool

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def remove(self) -> int:
        """Delete it, and return the bytes freed.

        Raises LocalLLMError if that fails, UsageError if it is being written.
        """
        with artefact_lock(self.path):
            freed = self.nbytes
            shutil.rmtree(self.path, ignore_errors=True)
            if self.path.exists():
                raise LocalLLMError(f"{self.path} cannot be removed", "check its permissions")
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()
        return freed


def recipe_of(quant: str) -> Recipe:
    """Return the recipe of a `--quant` value. Raises UsageError for an unknown value."""
    if quant not in RECIPES:
        raise UsageError(f"there is no quantization {quant!r}", f"use one of {', '.join(RECIPES)}")
    return RECIPES[quant]


def artefact_path(home: Path, model: Path, quant: str) -> Path:
    """Return the path of the artefact for a model's folder, which may not exist."""
    identity = source_identity(model)
    if "repo" in identity:
        name = f"{identity['repo'].replace('/', '--')}@{identity['commit'][:DIGEST_LENGTH]}"
    else:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]
        name = f"{UNSAFE.sub('-', Path(identity['folder']).name)}@{digest}"
    return home / QUANTIZED_FOLDER / name / quant


def find_artefact(home: Path, model: Path, quant: str) -> Path | None:
    """Return the artefact of a model's folder in its current state; None if there is none with the current recipe.

    Raises the errors of `recipe_of`.
    """
    recipe, path = recipe_of(quant), artefact_path(home, model, quant)
    provenance = read_provenance(path)
    is_current = provenance.get("source") == source_identity(model) and provenance.get("recipe") == asdict(recipe)
    return path if is_current else None


def list_artefacts(home: Path) -> Iterator[StoredArtefact]:
    """Iterate over all artefacts, complete or not, including those whose source is gone."""
    for path in sorted((home / QUANTIZED_FOLDER).glob("*/*")):
        provenance, quant = read_provenance(path), path.name.removesuffix(PARTIAL_SUFFIX)
        if path.is_dir() and quant in RECIPES:
            source = provenance.get("source", {})
            name = source.get("repo") or source.get("folder") or path.parent.name
            yield StoredArtefact(str(name), quant, path, complete=bool(provenance) and path.name == quant)


def find_artefacts(home: Path, source: str, quant: str) -> list[StoredArtefact]:
    """Return those of a repository or a folder's path, including those of earlier contents.

    Raises ModelNotFound if there is none, and UsageError like `recipe_of`.
    """
    recipe_of(quant)
    artefacts = [
        artefact for artefact in list_artefacts(home) if (artefact.source, artefact.quant) == (source, quant)
    ]
    if not artefacts:
        raise ModelNotFound(
            f"{source} has not been quantized to {quant}", f"`localllm run {source} --quant {quant}` quantizes it"
        )
    return artefacts


def read_provenance(path: Path) -> dict[str, Any]:
    """Return an artefact's source and recipe; {} if they cannot be read."""
    try:
        return read_json(path / RECIPE_FILE)
    except DamagedModel:
        return {}


@contextmanager
def artefact_lock(path: Path, on_wait: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold an artefact's lock.

    on_wait: called once if another process holds it; without it, that raises UsageError.
    """
    lock = path.parent.parent / LOCKS / f"{path.parent.name}-{path.name.removesuffix(PARTIAL_SUFFIX)}.lock"
    with explain_disk_errors(path):
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file_lock = FileLock(lock)
        try:
            file_lock.acquire(timeout=0)
        except Timeout:
            if on_wait is None:
                raise UsageError(
                    f"another process is writing {path}", "wait until it has finished, or stop it"
                ) from None
            on_wait()
            file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise DiskFull if the disk for `folder` has fewer than `needed` bytes free."""
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing_folder).free
    if free < needed:
        raise DiskFull(
            f"{folder} will take about {format_bytes(needed)}, but the disk has {format_bytes(free)} left",
            "free space, or name a folder on another disk",
        )


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically; once this returns, it survives a power failure."""
    draft = path.with_name(path.name + DRAFT_SUFFIX)
    draft.write_bytes(content)
    publish_draft(draft, path)


def publish_draft(draft: Path, path: Path) -> None:
    """Rename a complete draft to its final name."""
    fsync_path(draft)
    os.replace(draft, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
