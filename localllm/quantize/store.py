"""Where models lie that `--quant` has quantized: <home>/quantized/SOURCE/QUANT, each tied to the very weights that
it was made of.

A folder that is being written ends in `.partial` and is never taken for whole. No torch.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UsageError
from localllm.files import explain_disk_errors, read_json
from localllm.quantize.recipe import Recipe
from localllm.quantize.source import PARTIAL_SUFFIX, RECIPE_FILE, source_identity

RECIPES = {"int8": Recipe("rtn", 8, None), "int4": Recipe("rtn", 4, 128)}
QUANTIZED_FOLDER, LOCKS = "quantized", ".locks"
DIGEST_LENGTH = 12  # characters of a digest or a commit: enough to tell a person's models apart
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class StoredArtefact:
    """One artefact, or what an interrupted run left of it."""

    source: str  # ORG/REPO, or the path of a folder
    quant: str
    path: Path
    complete: bool

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def remove(self) -> int:
        """Gives the bytes that were freed. Raises LocalLLMError where something cannot be deleted, UsageError
        where a process is writing it."""
        with artefact_lock(self.path):
            freed = self.nbytes
            shutil.rmtree(self.path, ignore_errors=True)
            if self.path.exists():
                raise LocalLLMError(f"{self.path} cannot be removed", "check the rights on it")
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()
        return freed


def recipe_of(quant: str) -> Recipe:
    """What `--quant` stands for. Raises UsageError for a quantization that is none."""
    if quant not in RECIPES:
        raise UsageError(f"there is no quantization {quant!r}", f"name one of {', '.join(RECIPES)}")
    return RECIPES[quant]


def artefact_path(home: Path, model: Path, quant: str) -> Path:
    """Where the artefact of a model's folder lies, or would."""
    made_of = source_identity(model)
    if "repo" in made_of:
        name = f"{made_of['repo'].replace('/', '--')}@{made_of['commit'][:DIGEST_LENGTH]}"
    else:
        digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]
        name = f"{UNSAFE.sub('-', Path(made_of['folder']).name)}@{digest}"
    return home / QUANTIZED_FOLDER / name / quant


def find_artefact(home: Path, model: Path, quant: str) -> Path | None:
    """The artefact of a model's folder as it is now; None where there is none yet, or of another recipe. Raises as
    `recipe_of`."""
    recipe, path = recipe_of(quant), artefact_path(home, model, quant)
    made = read_provenance(path)
    same = made.get("source") == source_identity(model) and made.get("recipe") == asdict(recipe)
    return path if same else None


def list_artefacts(home: Path) -> Iterator[StoredArtefact]:
    """All artefacts, whole or not, also those whose source is gone."""
    for path in sorted((home / QUANTIZED_FOLDER).glob("*/*")):
        made, quant = read_provenance(path), path.name.removesuffix(PARTIAL_SUFFIX)
        if path.is_dir() and quant in RECIPES:
            source = made.get("source", {})
            name = source.get("repo") or source.get("folder") or path.parent.name
            yield StoredArtefact(str(name), quant, path, complete=bool(made) and path.name == quant)


def find_artefacts(home: Path, source: str, quant: str) -> list[StoredArtefact]:
    """Those of a repository, or of the folder at a path, also of what that held before.

    Raises ModelNotFound where there is none, UsageError as `recipe_of`.
    """
    recipe_of(quant)
    found = [one for one in list_artefacts(home) if (one.source, one.quant) == (source, quant)]
    if not found:
        raise ModelNotFound(
            f"{source} has not been quantized to {quant}", f"`localllm run {source} --quant {quant}` does that"
        )
    return found


def read_provenance(path: Path) -> dict[str, Any]:
    """What an artefact says it was made of; {} where it says nothing that can be read."""
    try:
        return read_json(path / RECIPE_FILE)
    except DamagedModel:
        return {}


@contextmanager
def artefact_lock(path: Path, on_wait: Callable[[], object] | None = None) -> Iterator[None]:
    """For one process at a time. on_wait: told once that another has it; without it that is a UsageError."""
    lock = path.parent.parent / LOCKS / f"{path.parent.name}-{path.name.removesuffix(PARTIAL_SUFFIX)}.lock"
    with explain_disk_errors(path):
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = FileLock(lock)
        try:
            held.acquire(timeout=0)
        except Timeout:
            if on_wait is None:
                raise UsageError(f"another process is writing {path}", "wait for it, or end it") from None
            on_wait()
            held.acquire()
    try:
        yield
    finally:
        held.release()
