"""The files of a repository on the Hub at one commit. The Hub's answer is untrusted: paths, sizes and digests are
checked here, before any of them becomes part of a path."""

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
from localllm.hub.http import Notify, retrying, translate_errors
from localllm.hub.names import RepoName

COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_FILES = 100_000
MAX_NAME_BYTES = 255  # of one component of a path, the limit of Linux and macOS
MAX_PATH_BYTES = 1024
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")  # control characters and lone surrogates


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository on the Hub."""

    path: str  # relative to the repository
    size: int  # bytes
    digest: str  # SHA-256 of an LFS file, git's SHA-1 of any other; also the name of its blob in the cache

    def new_hasher(self) -> "hashlib._Hash":
        """Return a hash object that computes `digest` from the file's content."""
        return new_hasher(self.digest, self.size)


@dataclass(frozen=True)
class Listing:
    """All files of a repository at one commit."""

    repo: RepoName
    commit: str
    files: tuple[RemoteFile, ...]

    def find(self, path: str) -> RemoteFile | None:
        return next((file for file in self.files if file.path == path), None)


def new_hasher(digest: str, size: int) -> "hashlib._Hash":
    """Return a hash object for digests of this length, SHA-256 or git's SHA-1 of a blob. size: of the file."""
    if SHA256.fullmatch(digest):
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def fetch_listing(repo: RepoName, notify: Notify) -> Listing:
    """Request the listing from the Hub. Raises ModelNotFound, AccessDenied, NetworkError; the last also for an
    invalid response."""
    api = HfApi()
    with translate_errors(repo):
        retry = retrying(str(repo), notify, Event())
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        commit = _parse(
            lambda: retry(api.model_info, repo.repo, revision=repo.revision, timeout=timeout).sha, repo
        )
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise _invalid_response(repo, f"the commit {commit!r}")
        return Listing(repo, commit, _parse(lambda: _list_files(api, repo, commit), repo))


def _list_files(api: HfApi, repo: RepoName, commit: str) -> tuple[RemoteFile, ...]:
    files: dict[str, RemoteFile] = {}
    for entry in api.list_repo_tree(repo.repo, recursive=True, revision=commit):
        if isinstance(entry, RepoFile):
            file = _remote_file(entry, repo)
            if file.path in files:
                raise _invalid_response(repo, f"{file.path!r} twice")
            if len(files) == MAX_FILES:
                raise _invalid_response(repo, f"over {MAX_FILES} files")
            files[file.path] = file
    return tuple(files.values())


def _remote_file(entry: RepoFile, repo: RepoName) -> RemoteFile:
    path, pattern = entry.path, SHA256 if entry.lfs else SHA1
    digest, size = (entry.lfs.sha256, entry.lfs.size) if entry.lfs else (entry.blob_id, entry.size)
    if not isinstance(path, str) or not is_safe(path):
        raise _invalid_response(repo, f"a file named {str(path)[:100]!r}")
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise _invalid_response(repo, f"the digest {str(digest)[:100]!r} of {path}")
    if type(size) is not int or not 0 <= size < 2**50 or size != entry.size:
        raise _invalid_response(repo, f"the size {size!r} of {path}, and {entry.size!r}")
    return RemoteFile(path, size, digest)


def is_safe(path: str) -> bool:
    """Whether a path stays inside the folder that it is joined to, on every operating system."""
    names = path.split("/")
    return (
        not UNSAFE.search(path)
        and not PurePosixPath(path).is_absolute()
        and not {"", ".", ".."} & set(names)
        and len(path.encode()) <= MAX_PATH_BYTES
        and all(len(name.encode()) <= MAX_NAME_BYTES for name in names)
    )


def _parse(request: Callable[[], Any], repo: RepoName) -> Any:
    """Return the result of a request, whose response huggingface_hub parses without checks."""
    try:
        return request()
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _invalid_response(repo, f"an invalid listing ({type(error).__name__}: {error})") from error


def _invalid_response(repo: RepoName, content: str) -> NetworkError:
    return NetworkError(f"the Hub returned {content} for {repo.repo}", "do not trust this hub or repository")
