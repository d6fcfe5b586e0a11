"""Are the files in the cache what the Hub gave? The name of a blob is the digest of what it should hold;
where the file system has no links, a pull keeps the digests beside the files.

That is looked at without the network. What is damaged or missing is fetched again, of the same commit.
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
from localllm.hub.gguf import missing_part
from localllm.hub.hf_cache import (
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

HASH_WORKERS = 4  # hashed at a time
READ_BYTES = 2**20


class State(StrEnum):
    GOOD = "good"
    DAMAGED = "damaged"
    MISSING = "missing"
    UNKNOWN = "unknown"  # another program's copy, or its blob has another name than a digest


FAULTY = (State.DAMAGED, State.MISSING)


@dataclass(frozen=True)
class Snapshot:
    """A revision of a repository in the cache, or one of its GGUF models."""

    repo: RepoName
    folder: Path
    is_whole_model: bool  # is it to be a whole model, or may a program have fetched some of its files alone?

    @property
    def commit(self) -> str:
        return self.folder.name

    def files(self) -> list[CachedFile]:
        """Raises ModelNotFound where that GGUF model is not here."""
        files = snapshot_files(self.folder)
        return files_of_model(files, self.repo) if self.repo.quant else files

    def missing(self) -> list[str]:
        """Files that have no name here, though others that are here need them; of a GGUF model the first."""
        try:
            if self.repo.quant is None and (self.is_whole_model or has_safetensors(self.folder)):
                return missing_files(self.folder)
        except (DamagedModel, UnsupportedModel):
            return []  # what names them is damaged, or it is no model that we run
        first = {missing_part(self.folder / model) for model in gguf_models(self.files())}
        return sorted(part.relative_to(self.folder).as_posix() for part in first if part)


def find_snapshots(repo: RepoName | None) -> list[Snapshot]:
    """What there is to verify: that of a name, or all revisions of all models.

    Raises ModelNotFound where nothing of that name is here.
    """
    if repo is None:
        return [found for root in sorted(cache_root().glob("models--*")) for found in _revisions(root)]
    commit = cached_commit(repo.repo, repo.revision)
    if commit is None:
        raise ModelNotFound(f"{repo} is not on this machine", f"run `localllm pull {repo}`")
    folder = repo_root(repo.repo) / "snapshots" / commit
    found = Snapshot(repo, folder, is_whole_model=not gguf_models(snapshot_files(folder)))
    found.files()
    return [found]


def _revisions(root: Path) -> list[Snapshot]:
    here, name = CachedRepo.read(root), root.name.removeprefix("models--").replace("--", "/")
    names = {meant: ref for ref, meant in here.refs.items()}
    broken_off = any(blob.name.endswith(PARTIAL_SUFFIX) for blob in here.unfinished)
    return [
        Snapshot(
            RepoName(name, names.get(commit, commit)),
            root / "snapshots" / commit,
            is_whole_model=broken_off and not gguf_models(files),
        )
        for commit, files in here.revisions.items()
        if files
    ]


def known_digests(found: Snapshot) -> dict[Path, str]:
    """The contents that can be looked at, each with the digest that it should have: the name of a blob, or what a
    pull has kept of a file that is no link."""
    kept = read_digests(found.repo.repo, found.commit)
    known: dict[Path, str] = {}
    for file in found.files():
        digest = file.blob.name if file.blob else kept.get(file.path, "")
        if is_digest(digest) and file.content.is_file():
            known[file.content] = digest
    return known


def hash_all(digests: Mapping[Path, str], on_read: Callable[[int], object] = lambda _: None) -> dict[Path, bool]:
    """Has each content its digest? `on_read` gets the bytes that were read, from several threads."""
    end = Event()
    with ThreadPoolExecutor(HASH_WORKERS) as pool:
        coming = [pool.submit(_is_good, path, digest, on_read, end) for path, digest in digests.items()]
        try:
            return {path: future.result() for path, future in zip(digests, coming, strict=True)}
        finally:
            end.set()  # for Ctrl-C


def _is_good(path: Path, expected: str, on_read: Callable[[int], object], end: Event) -> bool:
    digest = new_hasher(expected, path.stat().st_size)
    try:
        with path.open("rb", buffering=0) as file:
            while (content := file.read(READ_BYTES)) and not end.is_set():
                digest.update(content)
                on_read(len(content))
    except OSError as error:
        if error.errno == errno.EIO:  # the disk cannot read it any more
            return False
        raise
    return digest.hexdigest() == expected


def file_states(found: Snapshot, good: Mapping[Path, bool]) -> dict[str, State]:
    """The state of each file by its path, by what `hash_all` found."""
    here = {file.path: _state(file, good) for file in found.files()}
    return here | {path: State.MISSING for path in found.missing() if path not in here}


def _state(file: CachedFile, good: Mapping[Path, bool]) -> State:
    if not file.link.exists():
        return State.MISSING
    if file.content not in good:
        return State.UNKNOWN
    return State.GOOD if good[file.content] else State.DAMAGED


def repair(found: Snapshot, states: Mapping[str, State], progress: PullProgress) -> None:
    """Fetch again what is damaged or missing. Nothing is deleted before the Hub has said that it has that file.

    Raises as `pull`. The Hub may not list a file that somebody put there; that stays as it is.
    """
    if constants.is_offline_mode():
        raise NetworkError("HF_HUB_OFFLINE is set", "unset it to fetch them again")
    repo = replace(found.repo, revision=found.commit)
    listing = fetch_listing(repo, progress.say)
    faulty = [path for path, fault in states.items() if fault in FAULTY]
    for file in found.files():
        if states.get(file.path) is State.DAMAGED and listing.find(file.path):
            file.content.unlink(missing_ok=True)
    while wanted := tuple(file for path in faulty if (file := listing.find(path))):
        fetch_files(plan_files(listing, wanted), progress)
        faulty = found.missing()  # an index that was damaged may name more; the next part of a GGUF model
    if found.missing():
        fetch_files(
            plan_pull(repo, progress.say), progress
        )  # the Hub has it by another name, as tokenizers have several
