"""What a repository of the Hub holds at one commit. Trusts no answer: names, sizes and digests are checked here,
before any of them becomes part of a path."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from threading import Event
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from localllm.errors import NetworkError
from localllm.hub.hf_cache import SHA1, SHA256
from localllm.hub.http import Say, retrying, translate_errors
from localllm.hub.names import RepoName

COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_FILES = 100_000
MAX_NAME_BYTES = 255  # of one part of a path: what Linux and macOS take
MAX_PATH_BYTES = 1024
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")  # control characters, and halves of one


@dataclass(frozen=True)
class RemoteFile:
    path: str  # in the repository
    size: int  # bytes
    digest: str  # sha256 of a large file, git's sha1 of a small one: also the name of its blob in the cache

    def new_hasher(self) -> "hashlib._Hash":
        """Fed with the whole file, gives the digest."""
        return new_hasher(self.digest, self.size)


@dataclass(frozen=True)
class Listing:
    repo: RepoName
    commit: str
    files: tuple[RemoteFile, ...]

    def find(self, path: str) -> RemoteFile | None:
        return next((file for file in self.files if file.path == path), None)


def new_hasher(digest: str, size: int) -> "hashlib._Hash":
    """What makes a digest of this form from a file of this size: sha256, or sha1 as git names a blob."""
    if SHA256.fullmatch(digest):
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def fetch_listing(repo: RepoName, say: Say) -> Listing:
    """Ask the Hub. Raises ModelNotFound, AccessDenied and NetworkError; the last also for an answer that no hub
    should give."""
    api = HfApi()
    with translate_errors(repo):
        ask = retrying(str(repo), say, Event())
        wait = constants.HF_HUB_ETAG_TIMEOUT
        commit = _guarded(lambda: ask(api.model_info, repo.repo, revision=repo.revision, timeout=wait).sha, repo)
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise _implausible(repo, f"the commit {commit!r}")
        return Listing(repo, commit, _guarded(lambda: _files(api, repo, commit), repo))


def _files(api: HfApi, repo: RepoName, commit: str) -> tuple[RemoteFile, ...]:
    found: dict[str, RemoteFile] = {}
    for entry in api.list_repo_tree(repo.repo, recursive=True, revision=commit):
        if isinstance(entry, RepoFile):
            file = _remote_file(entry, repo)
            if file.path in found or len(found) == MAX_FILES:
                raise _implausible(
                    repo, f"{file.path!r} twice" if file.path in found else f"over {MAX_FILES} files"
                )
            found[file.path] = file
    return tuple(found.values())


def _remote_file(entry: RepoFile, repo: RepoName) -> RemoteFile:
    path, form = entry.path, SHA256 if entry.lfs else SHA1
    digest, size = (entry.lfs.sha256, entry.lfs.size) if entry.lfs else (entry.blob_id, entry.size)
    if not isinstance(path, str) or not is_safe(path):
        raise _implausible(repo, f"a file named {str(path)[:100]!r}")
    if not isinstance(digest, str) or not form.fullmatch(digest):
        raise _implausible(repo, f"the digest {str(digest)[:100]!r} of {path}")
    if type(size) is not int or not 0 <= size < 2**50 or size != entry.size:
        raise _implausible(repo, f"the size {size!r} of {path}, and {entry.size!r}")
    return RemoteFile(path, size, digest)


def is_safe(path: str) -> bool:
    """Does it stay below the folder that it is put into, on every system?"""
    names = path.split("/")
    return (
        not UNSAFE.search(path)
        and not PurePosixPath(path).is_absolute()
        and not {"", ".", ".."} & set(names)
        and len(path.encode()) <= MAX_PATH_BYTES
        and all(len(name.encode()) <= MAX_NAME_BYTES for name in names)
    )


def _guarded(ask: Callable[[], Any], repo: RepoName) -> Any:
    """The library takes an answer apart without a check."""
    try:
        return ask()
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _implausible(repo, f"something that is no listing ({type(error).__name__}: {error})") from error


def _implausible(repo: RepoName, what: str) -> NetworkError:
    return NetworkError(f"the hub gives {what} for {repo.repo}", "do not trust this hub or repository")
