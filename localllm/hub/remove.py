"""Removes a model from the Hugging Face cache: a revision of a repository, or one of its GGUF models.

Files that other revisions, branches or tags use are kept, and running downloads are not disturbed.
`huggingface_hub` deletes the files; it also handles contents that repositories share.
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
from localllm.hub.resolve import edition_in_cache

LOCK_WAIT_S = 0.05


@dataclass(frozen=True)
class KeptFile:
    """A file of the model that is not removed."""

    path: str  # relative to the repository
    size: int  # bytes
    why: str


@dataclass(frozen=True)
class Removal:
    """A planned removal."""

    repo: RepoName
    files: tuple[CachedFile, ...]  # removed
    unfinished: tuple[Path, ...]  # downloads, removed
    kept: tuple[KeptFile, ...]
    freed_bytes: int  # without those in `shared`
    shared: dict[Path, int]  # bytes of contents that other repositories may use, removed if none does
    strategy: DeleteCacheStrategy

    def execute(self) -> int:
        """Delete the files, and return the freed bytes. Raises LocalLLMError if a file cannot be deleted."""
        strategy = self.strategy
        with writing_cache(repo_root(self.repo.repo)):
            strategy.execute()
        for path in (*strategy.files, *strategy.blobs, *strategy.refs, *strategy.snapshots, *strategy.repos):
            if os.path.lexists(path):
                raise LocalLLMError(f"{path} cannot be removed", "check the permissions of the cache")
        for folder in {file.link.parent for file in self.files}:
            with suppress(OSError):  # already removed, or not empty
                folder.rmdir()
        return self.freed_bytes + sum(size for content, size in self.shared.items() if not content.exists())


def removable_repo(name: str) -> RepoName:
    """Return the repository that a name refers to. Raises UsageError if the model was not downloaded."""
    match parse_name(name):
        case RepoName() as repo:
            return edition_in_cache(repo)
        case CatalogEntry():
            raise UsageError(f"{name} is part of localllm and stays", "`localllm list` shows what was downloaded")
        case Path() as path:
            raise UsageError(f"{name} is a path, and only downloads are removed", f"delete it: `rm -r {path}`")


def plan_removal(repo: RepoName) -> Removal:
    """Determine which files would be removed.

    Raises ModelNotFound if the model is not in the cache, UsageError if it is being downloaded, if several models
    match, or if another branch has the same commit but not all its files would be removed.
    """
    cached = CachedRepo.read(repo_root(repo.repo))
    commit = cached_commit(repo.repo, repo.revision)
    _refuse_if_fetching(repo, cached)
    if commit is None:
        if any(cached.revisions.values()) or not cached.unfinished:
            raise ModelNotFound(f"{repo} is not on this machine", "`localllm list` shows the models that are")
        return _removal(repo, cached, [], [], repos={cached.root})
    in_revision = cached.revisions[commit]
    files = _selected_files(repo, in_revision)
    is_all = len(files) == len(in_revision)
    for ref, target in cached.refs.items():
        if target == commit and repo.revision not in (ref, commit):
            return _remove_ref_only(repo, cached, files, commit, ref, is_all)
    selected = set(files)
    users = {
        file.blob: file.path if name == commit else f"revision {cached.ref_name(name)}"
        for name, content in cached.revisions.items()
        for file in content
        if file.blob and file not in selected
    }
    removed = [file for file in files if file.blob not in users]
    kept = [KeptFile(f.path, f.size, f"{users[f.blob]} has it, too") for f in files if f.blob in users]
    if is_all and not any(content for name, content in cached.revisions.items() if name != commit):
        return _removal(repo, cached, removed, kept, repos={cached.root})
    if not is_all:
        return _removal(repo, cached, removed, kept, files={file.link for file in files})
    paths = (f"snapshots/{commit}", f".no_exist/{commit}", f"trees/{commit}.json", f"digests/{commit}.json")
    snapshots = {cached.root / path for path in paths if (cached.root / path).exists()}
    refs = {cached.root / "refs" / ref for ref, target in cached.refs.items() if target == commit}
    return _removal(repo, cached, removed, kept, snapshots=snapshots, refs=refs)


def _refuse_if_fetching(repo: RepoName, cached: CachedRepo) -> None:
    """Raise UsageError if another process holds the lock of an unfinished download."""
    for blob in cached.unfinished:
        lock = cache_root() / ".locks" / cached.root.name / f"{blob.name.partition('.')[0]}.lock"
        if lock.exists():
            try:
                with WeakFileLock(lock, timeout=LOCK_WAIT_S):
                    pass
            except Timeout as error:
                raise UsageError(f"another process is fetching {repo.repo}", "wait for it, or end it") from error


def _selected_files(repo: RepoName, files: list[CachedFile]) -> list[CachedFile]:
    """Return all files of a revision, or those of the GGUF model that `repo` names."""
    models = gguf_models(files)
    has_other_weights = any(file.path in (SINGLE_FILE, INDEX_FILE) for file in files)
    if repo.quant is None and len(models) > 1 and not has_other_weights:
        names = ", ".join(str(replace(repo, quant=tag)) for tag in model_tags(models))
        raise UsageError(f"{repo} contains several models", f"name those to remove: {names}")
    if repo.quant is None:
        return files
    selected = files_of_model(files, repo)
    return selected if has_other_weights or len(models) > 1 else files  # otherwise no weights would remain


def _remove_ref_only(
    repo: RepoName, cached: CachedRepo, files: list[CachedFile], commit: str, other_ref: str, is_all: bool
) -> Removal:
    """Remove a branch or tag, and keep the files of its commit for another one."""
    if not is_all:
        by_commit = replace(repo, revision=commit)
        raise UsageError(
            f"{repo.revision} and {other_ref} are the same revision",
            f"`localllm rm {by_commit}` removes it for both",
        )
    kept = [KeptFile(file.path, file.size, f"{other_ref} is the same revision") for file in files]
    return _removal(repo, cached, [], kept, refs={cached.root / "refs" / repo.revision})


def _removal(
    repo: RepoName, cached: CachedRepo, removed: list[CachedFile], kept: list[KeptFile], **paths: Collection[Path]
) -> Removal:
    contents = {file.blob or file.link for file in removed} | set(cached.unfinished)
    if "repos" in paths:
        contents = {Path(folder, name) for folder, _, names in os.walk(cached.root) for name in names}
    contents = {path for path in contents if os.path.lexists(path)}
    blobs = frozenset(path for path in contents if path.parent.name == "blobs")
    shared = {blob.resolve(): blob.stat().st_size for blob in blobs if blob.is_symlink() and blob.exists()}
    freed_bytes = sum(map(_disk_bytes, contents))
    todo = {name: frozenset(paths.get(name, ())) for name in ("repos", "snapshots", "refs", "files")}
    strategy = DeleteCacheStrategy(
        freed_bytes, blobs=frozenset() if todo["repos"] else blobs, cache_dir=cache_root().resolve(), **todo
    )
    return Removal(repo, tuple(removed), tuple(cached.unfinished), tuple(kept), freed_bytes, shared, strategy)


def _disk_bytes(path: Path) -> int:
    """Return the disk space that deleting a file frees; less than its size for a sparse file, 0 if it is
    linked."""
    entry = path.lstat()
    return min(entry.st_size, entry.st_blocks * 512) if S_ISREG(entry.st_mode) and entry.st_nlink == 1 else 0
