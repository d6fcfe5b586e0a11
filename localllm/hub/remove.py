"""Takes a model out of the Hugging Face cache: a revision of a repository, or one of its GGUF models.

What another revision, branch or tag uses stays, and so does what is being fetched. The deleting is done by
`huggingface_hub`, which also knows of contents that repositories share.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

from filelock import Timeout
from huggingface_hub import DeleteCacheStrategy
from huggingface_hub.utils import WeakFileLock

from localllm.errors import LocalLLMError, ModelNotFound, UsageError
from localllm.hub.catalog import CatalogEntry
from localllm.hub.file_download import writing_cache
from localllm.hub.gguf import model_tags
from localllm.hub.hf_cache import (
    CachedFile,
    CachedRepo,
    cache_root,
    cached_commit,
    files_of_model,
    gguf_models,
    repo_root,
)
from localllm.hub.model_files import INDEX_FILE, SINGLE_FILE
from localllm.hub.names import RepoName, parse_name

LOCK_WAIT_S = 0.05


@dataclass(frozen=True)
class KeptFile:
    path: str  # in the repository
    size: int  # bytes
    why: str


@dataclass(frozen=True)
class Removal:
    """What is going to be removed, before it is."""

    repo: RepoName
    files: tuple[CachedFile, ...]
    unfinished: tuple[Path, ...]
    kept: tuple[KeptFile, ...]
    freed_bytes: int  # bytes
    shared: dict[Path, int]  # contents that other repositories may use; they go too, if none does
    strategy: DeleteCacheStrategy

    def execute(self) -> int:
        """Gives the bytes that were freed. Raises LocalLLMError where something cannot be deleted."""
        todo = self.strategy
        with writing_cache(repo_root(self.repo.repo)):
            todo.execute()
        for path in (*todo.files, *todo.blobs, *todo.refs, *todo.snapshots, *todo.repos):
            if os.path.lexists(path):
                raise LocalLLMError(f"{path} cannot be removed", "check the rights on the cache")
        for folder in {file.link.parent for file in self.files}:
            with suppress(OSError):  # it is gone, or not empty
                folder.rmdir()
        return self.freed_bytes + sum(size for content, size in self.shared.items() if not content.exists())


def plan_removal(repo: RepoName) -> Removal:
    """Raises ModelNotFound where nothing of that name is here, UsageError where it is being fetched, where several
    models could be meant, or where it is one of several by another name."""
    here = CachedRepo.read(repo_root(repo.repo))
    commit = cached_commit(repo.repo, repo.revision)
    _refuse_if_fetching(repo, here)
    if commit is None:
        if any(here.revisions.values()) or not here.unfinished:
            raise ModelNotFound(f"{repo} is not on this machine", "`localllm list` shows what is")
        return _removal(repo, here, [], [], repos={here.root})
    of_revision = here.revisions[commit]
    files = _selected_files(repo, of_revision)
    whole = len(files) == len(of_revision)
    for ref, stands_for in here.refs.items():
        if stands_for == commit and repo.revision not in (ref, commit):
            return _remove_ref_only(repo, here, files, commit, ref, whole)
    meant = set(files)
    users = {
        file.blob: file.path if name == commit else f"revision {here.ref_name(name)}"
        for name, content in here.revisions.items()
        for file in content
        if file.blob and file not in meant
    }
    gone = [file for file in files if file.blob not in users]
    kept = [KeptFile(f.path, f.size, f"{users[f.blob]} has it, too") for f in files if f.blob in users]
    if whole and not any(content for name, content in here.revisions.items() if name != commit):
        return _removal(repo, here, gone, kept, repos={here.root})
    if not whole:
        return _removal(repo, here, gone, kept, files={file.link for file in files})
    marks = (f"snapshots/{commit}", f".no_exist/{commit}", f"trees/{commit}.json", f"digests/{commit}.json")
    snapshots = {here.root / mark for mark in marks if (here.root / mark).exists()}
    refs = {here.root / "refs" / ref for ref, other in here.refs.items() if other == commit}
    return _removal(repo, here, gone, kept, snapshots=snapshots, refs=refs)


def removable_repo(name: str) -> RepoName:
    """What a name stands for that `plan_removal` takes. Raises UsageError for what is no download."""
    match parse_name(name):
        case RepoName() as repo:
            return repo
        case CatalogEntry():
            raise UsageError(f"{name} comes with localllm and stays", "`localllm list` shows what was downloaded")
        case Path() as path:
            raise UsageError(f"{name} is a path, and only downloads are removed", f"delete it: `rm -r {path}`")


def _refuse_if_fetching(repo: RepoName, here: CachedRepo) -> None:
    """Whoever fetches a file holds its lock."""
    for blob in here.unfinished:
        lock = cache_root() / ".locks" / here.root.name / f"{blob.name.partition('.')[0]}.lock"
        if lock.exists():
            try:
                with WeakFileLock(lock, timeout=LOCK_WAIT_S):
                    pass
            except Timeout as error:
                raise UsageError(f"another process is fetching {repo.repo}", "wait for it, or end it") from error


def _selected_files(repo: RepoName, files: list[CachedFile]) -> list[CachedFile]:
    """All files of a revision, or those of one of its GGUF models."""
    models = gguf_models(files)
    others = any(file.path in (SINGLE_FILE, INDEX_FILE) for file in files)
    if repo.quant is None and len(models) > 1 and not others:
        names = ", ".join(str(replace(repo, quant=tag)) for tag in model_tags(models))
        raise UsageError(f"{repo} holds several models", f"name those that are to go: {names}")
    if repo.quant is None:
        return files
    chosen = files_of_model(files, repo)
    return chosen if others or len(models) > 1 else files  # else nothing that is left would be a model


def _remove_ref_only(
    repo: RepoName, here: CachedRepo, files: list[CachedFile], commit: str, other: str, whole: bool
) -> Removal:
    """Another branch or tag stands for the same commit."""
    if not whole:
        both = replace(repo, revision=commit)
        raise UsageError(
            f"{repo.revision} and {other} are one revision", f"`localllm rm {both}` removes it for both"
        )
    kept = [KeptFile(file.path, file.size, f"{other} is the same revision") for file in files]
    return _removal(repo, here, [], kept, refs={here.root / "refs" / repo.revision})


def _removal(
    repo: RepoName, here: CachedRepo, gone: list[CachedFile], kept: list[KeptFile], **paths: Collection[Path]
) -> Removal:
    content = {file.blob or file.link for file in gone} | set(here.unfinished)
    if "repos" in paths:
        content = {Path(folder, name) for folder, _, names in os.walk(here.root) for name in names}
    content = {path for path in content if os.path.lexists(path)}
    blobs = frozenset(path for path in content if path.parent.name == "blobs")
    shared = {blob.resolve(): blob.stat().st_size for blob in blobs if blob.is_symlink() and blob.exists()}
    frees = sum(map(_disk_bytes, content))
    todo = {kind: frozenset(paths.get(kind, ())) for kind in ("repos", "snapshots", "refs", "files")}
    strategy = DeleteCacheStrategy(
        frees, blobs=frozenset() if todo["repos"] else blobs, cache_dir=cache_root().resolve(), **todo
    )
    return Removal(repo, tuple(gone), tuple(here.unfinished), tuple(kept), frees, shared, strategy)


def _disk_bytes(path: Path) -> int:
    """What a file takes from the disk that nothing else holds; one with holes takes less than its size."""
    entry = path.lstat()
    return min(entry.st_size, entry.st_blocks * 512) if S_ISREG(entry.st_mode) and entry.st_nlink == 1 else 0
