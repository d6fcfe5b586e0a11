"""Verifies the files in the cache against their digests, and repairs them.

The name of a blob is the digest of its content; on file systems without links, a pull records the digests in a
file. Verification needs no network. Damaged and missing files are downloaded again, from the same commit.
"""

import errno
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from threading import Event

from huggingface_hub import constants

from localllm.errors import DamagedModel, ModelNotFound, NetworkError, UnsupportedModel
from localllm.hub.file_download import writing_cache
from localllm.hub.gguf import missing_part
from localllm.hub.hf_cache import (
    REPO_FOLDER,
    CachedFile,
    CachedRepo,
    cache_root,
    cached_commit,
    files_of_model,
    gguf_models,
    is_digest,
    read_digests,
    repo_root,
    snapshot_files,
)
from localllm.hub.listing import fetch_listing, new_hasher
from localllm.hub.model_files import missing_files
from localllm.hub.names import RepoName
from localllm.hub.partial_file import PARTIAL_SUFFIX
from localllm.hub.pull import PullProgress, fetch_files, plan_files, plan_pull
from localllm.hub.resolve import has_safetensors

HASH_WORKERS = 4
READ_BYTES = 2**20


class FileState(StrEnum):
    GOOD = "good"
    DAMAGED = "damaged"
    MISSING = "missing"
    UNKNOWN = "unknown"  # its digest was not recorded, as in another program's copy


FAULTY = (FileState.DAMAGED, FileState.MISSING)


@dataclass(frozen=True)
class Snapshot:
    """A revision of a repository in the cache, or one of its GGUF models."""

    repo: RepoName
    folder: Path
    must_be_complete: bool  # otherwise a program may have downloaded only some of its files

    @property
    def commit(self) -> str:
        return self.folder.name

    def files(self) -> list[CachedFile]:
        """Return the cached files. Raises ModelNotFound if the GGUF model is not in the snapshot."""
        files = snapshot_files(self.folder)
        return files_of_model(files, self.repo) if self.repo.quant else files

    def missing(self) -> list[str]:
        """Return required files that are not in the snapshot; of a split GGUF model only the first."""
        try:
            if self.repo.quant is None and (self.must_be_complete or has_safetensors(self.folder)):
                return missing_files(self.folder)
        except (DamagedModel, UnsupportedModel):
            return []  # the file that names them is damaged, or the model is not supported
        parts = {missing_part(self.folder / model) for model in gguf_models(self.files())}
        return sorted(part.relative_to(self.folder).as_posix() for part in parts if part)


def find_snapshots(repo: RepoName | None) -> list[Snapshot]:
    """Return the snapshot of a model, or all snapshots in the cache.

    Raises ModelNotFound if the model is not in the cache.
    """
    if repo is None:
        roots = sorted(cache_root().glob(f"{REPO_FOLDER}*"))
        return [snapshot for root in roots for snapshot in _snapshots(root)]
    commit = cached_commit(repo.repo, repo.revision)
    if commit is None:
        raise ModelNotFound(f"{repo} is not on this machine", f"run `localllm pull {repo}`")
    folder = repo_root(repo.repo) / "snapshots" / commit
    snapshot = Snapshot(repo, folder, must_be_complete=not gguf_models(snapshot_files(folder)))
    snapshot.files()  # raises if the GGUF model is missing
    return [snapshot]


def _snapshots(root: Path) -> list[Snapshot]:
    cached, name = CachedRepo.read(root), root.name.removeprefix(REPO_FOLDER).replace("--", "/")
    has_aborted_pull = any(blob.name.endswith(PARTIAL_SUFFIX) for blob in cached.unfinished)
    return [
        Snapshot(
            RepoName(name, cached.ref_name(commit)),
            root / "snapshots" / commit,
            must_be_complete=has_aborted_pull and not gguf_models(files),
        )
        for commit, files in cached.revisions.items()
        if files
    ]


def known_digests(snapshot: Snapshot) -> dict[Path, str]:
    """Return the expected digest of each content that can be verified: the blob's name, or the recorded digest."""
    recorded = read_digests(snapshot.repo.repo, snapshot.commit)
    digests: dict[Path, str] = {}
    for file in snapshot.files():
        digest = file.blob.name if file.blob else recorded.get(file.path, "")
        if is_digest(digest) and file.content.is_file():
            digests[file.content] = digest
    return digests


def hash_all(digests: Mapping[Path, str], on_read: Callable[[int], object] = lambda _: None) -> dict[Path, bool]:
    """Return whether each content has its digest. on_read: called with numbers of bytes, from several threads."""
    stop = Event()
    with ThreadPoolExecutor(HASH_WORKERS) as pool:
        futures = [pool.submit(_has_digest, path, digest, on_read, stop) for path, digest in digests.items()]
        try:
            return {path: future.result() for path, future in zip(digests, futures, strict=True)}
        finally:
            stop.set()  # for Ctrl-C


def _has_digest(path: Path, expected: str, on_read: Callable[[int], object], stop: Event) -> bool:
    digest = new_hasher(expected, path.stat().st_size)
    try:
        with path.open("rb", buffering=0) as file:
            while (content := file.read(READ_BYTES)) and not stop.is_set():
                digest.update(content)
                on_read(len(content))
    except OSError as error:
        if error.errno == errno.EIO:  # the disk can no longer read it
            return False
        raise
    return digest.hexdigest() == expected


def file_states(snapshot: Snapshot, good: Mapping[Path, bool]) -> dict[str, FileState]:
    """Return the state of each file by path. good: the result of `hash_all`."""
    states = {file.path: _state(file, good) for file in snapshot.files()}
    return states | {path: FileState.MISSING for path in snapshot.missing() if path not in states}


def _state(file: CachedFile, good: Mapping[Path, bool]) -> FileState:
    if not file.link.exists():
        return FileState.MISSING
    if file.content not in good:
        return FileState.UNKNOWN
    return FileState.GOOD if good[file.content] else FileState.DAMAGED


def repair(snapshot: Snapshot, states: Mapping[str, FileState], progress: PullProgress) -> None:
    """Download damaged and missing files again. A damaged file is only deleted if the Hub lists it.

    Raises the errors of `pull`.
    """
    if constants.is_offline_mode():
        raise NetworkError("HF_HUB_OFFLINE is set", "unset it to repair the files")
    repo = replace(snapshot.repo, revision=snapshot.commit)
    listing = fetch_listing(repo, progress.say)
    faulty = [path for path, state in states.items() if state in FAULTY]
    with writing_cache(repo_root(repo.repo)):
        for file in snapshot.files():
            if states.get(file.path) is FileState.DAMAGED and listing.find(file.path):
                file.content.unlink(missing_ok=True)
    while files := tuple(file for path in faulty if (file := listing.find(path))):
        fetch_files(plan_files(listing, files), progress)
        faulty = snapshot.missing()  # a repaired index may name more files, and a GGUF model have another part
    if snapshot.missing():  # on the Hub it may have another name, as tokenizer files do
        fetch_files(plan_pull(repo, progress.say), progress)
