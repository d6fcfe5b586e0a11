"""Pulls a model from the Hub into the Hugging Face cache, where other programs that use the cache find it, too.

The layout is that of `huggingface_hub`: contents in `blobs` by digest, links to them in `snapshots`, branches in
`refs`. A branch only moves to a new commit when all its files are complete, so the previous snapshot stays usable.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Protocol
from uuid import uuid4

from huggingface_hub.file_download import _create_symlink

from localllm.errors import DamagedModel, DiskFull, NetworkError, UnsupportedModel
from localllm.files import TOKENIZER_FILES, parse_json, write_atomic
from localllm.formatting import format_bytes
from localllm.hub.file_download import FileTransfer, first_error, is_complete, read_range, writing_cache
from localllm.hub.gguf import choose_model, distinct_models, part_files
from localllm.hub.hf_cache import (
    blob_path,
    cached_commit,
    digests_file,
    nearest_existing,
    read_digests,
    repo_root,
)
from localllm.hub.http import Notify
from localllm.hub.listing import COMMIT, Listing, RemoteFile, fetch_listing
from localllm.hub.model_files import (
    COMPANION_FILES,
    INDEX_FILE,
    SINGLE_FILE,
    TEMPLATES_FOLDER,
    files_in_index,
    is_pickle,
    refuse_pickles,
)
from localllm.hub.names import RepoName
from localllm.hub.partial_file import PARTIAL_SUFFIX, downloaded_bytes
from localllm.hub.resolve import downloaded_path
from localllm.hub.sentence_transformers import MODULES_FILE, parse_modules

CONNECTIONS = 8  # concurrent requests, for all files together
FILE_WORKERS = 4  # concurrent files; each hashes its content on a thread of its own
SMALL_BYTES = 64 * 2**20  # limit of files that are read into memory: configurations, indexes
SPARE_BYTES = 64 * 2**20  # of the disk remain free

ReadFile = Callable[[RemoteFile], bytes]  # returns the content of a small file


@dataclass(frozen=True)
class PullPlan:
    """The files that a pull provides, and how much of each is already cached."""

    listing: Listing
    files: tuple[RemoteFile, ...]  # all that the model needs, weights last
    cached_bytes: dict[str, int]  # downloaded bytes by digest

    @property
    def contents(self) -> dict[str, list[RemoteFile]]:
        """Files by digest: those with the same content are downloaded once."""
        files: dict[str, list[RemoteFile]] = {}
        for file in self.files:
            files.setdefault(file.digest, []).append(file)
        return files

    @property
    def total_bytes(self) -> int:
        return sum(files[0].size for files in self.contents.values())

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - sum(self.cached_bytes.values())


class PullProgress(Protocol):
    """Observer of a pull, called from several threads. An exception it raises aborts the pull, which can be
    resumed."""

    def begin(self, plan: PullPlan, /) -> None: ...
    def advance(self, file: RemoteFile, count: int) -> None:
        """Report `count` downloaded bytes; negative: so many must be downloaded again; 0: still working."""
        ...

    def finish(self, file: RemoteFile) -> None:
        """Report that a file is complete and verified."""
        ...

    def say(self, text: str) -> None:
        """Show a message to the user."""
        ...


def plan_pull(repo: RepoName, notify: Notify) -> PullPlan:
    """Determine which files the model needs, and which of them are missing in the cache.

    Raises ModelNotFound, AccessDenied, NetworkError, UnsupportedModel.
    """
    listing = fetch_listing(repo, notify)
    return plan_files(listing, select_files(listing, lambda file: read_small(listing, file, notify)))


def plan_files(listing: Listing, files: tuple[RemoteFile, ...]) -> PullPlan:
    """Return the plan to pull the given files of a repository."""
    cached: dict[str, int] = {}
    for file in files:
        cached[file.digest] = max(cached.get(file.digest, 0), cached_bytes_of(file, listing))
    return PullPlan(listing, files, cached)


def cached_bytes_of(file: RemoteFile, listing: Listing) -> int:
    """Return how many bytes of a file are in the cache."""
    blob = blob_path(listing.repo.repo, file.digest)
    name = repo_root(listing.repo.repo) / "snapshots" / listing.commit / file.path
    if is_complete(blob, file) or is_complete_copy(name, file):
        return file.size
    return downloaded_bytes(blob.with_name(file.digest + PARTIAL_SUFFIX), file.size)


def select_files(listing: Listing, read: ReadFile) -> tuple[RemoteFile, ...]:
    """Return the files of the model that `listing.repo` names, weights last; no other formats of the same weights.

    Safetensors are preferred unless a GGUF model is named. Raises UnsupportedModel if no weights can be loaded,
    ModelNotFound if several GGUF models match, DamagedModel for an invalid index.
    """
    weights = _safetensors(listing, read) if listing.repo.quant is None else ()
    if weights:
        return (*_companion_files(listing), *_module_files(listing, read), *weights)
    models = distinct_models(PurePosixPath(file.path) for file in listing.files)
    if not models:
        _raise_unsupported(listing)
    model = choose_model(models, listing.repo.quant, listing.repo.repo)
    readme = listing.find("README.md")
    return (*([readme] if readme else []), *(_require_file(listing, str(part)) for part in part_files(model)))


def _safetensors(listing: Listing, read: ReadFile) -> tuple[RemoteFile, ...]:
    single, index = listing.find(SINGLE_FILE), listing.find(INDEX_FILE)
    if not listing.find("config.json") or not (single or index):
        return ()
    if index is None:
        return (single,) if single else ()
    path = PurePosixPath(listing.repo.repo, INDEX_FILE)
    return index, *(_require_file(listing, name) for name in files_in_index(parse_json(read(index), path), path))


def _companion_files(listing: Listing) -> list[RemoteFile]:
    tokenizer = next((file for name in TOKENIZER_FILES if (file := listing.find(name))), None)
    if tokenizer is None:
        raise UnsupportedModel(
            f"{listing.repo.repo} has no supported tokenizer ({', '.join(TOKENIZER_FILES)})",
            "use another edition of the model",
        )
    companions = [file for name in COMPANION_FILES if (file := listing.find(name))]
    templates = [
        file for file in listing.files if PurePosixPath("/", file.path).match(f"/{TEMPLATES_FOLDER}/*.jinja")
    ]
    return [*companions, tokenizer, *templates]


def _module_files(listing: Listing, read: ReadFile) -> list[RemoteFile]:
    """Return the files of an embedding model's modules, which are in subfolders."""
    file = listing.find(MODULES_FILE)
    modules = parse_modules(read(file), PurePosixPath(listing.repo.repo, MODULES_FILE)) if file else ()
    return [_require_file(listing, name) for module in modules for name in module.files]


def _require_file(listing: Listing, path: str) -> RemoteFile:
    if file := listing.find(path):
        return file
    raise UnsupportedModel(f"{listing.repo} lacks {path}, a part of its own weights", "use another edition of it")


def _raise_unsupported(listing: Listing) -> None:
    names = [file.path for file in listing.files]
    if listing.repo.quant is None:
        refuse_pickles(sorted(name for name in names if is_pickle(name)), listing.repo.repo)
    missing = "GGUF files" if listing.repo.quant else "config.json with safetensors weights, and no GGUF file"
    raise UnsupportedModel(f"{listing.repo.repo} has no {missing}", "use another edition of the model")


def read_small(listing: Listing, file: RemoteFile, notify: Notify) -> bytes:
    """Return the verified content of a configuration or an index. Raises NetworkError, AccessDenied,
    DamagedModel."""
    if file.size > SMALL_BYTES:
        raise NetworkError(f"{file.path} of {listing.repo} has {file.size} bytes", "use another edition of it")
    content = read_range(listing, file, 0, file.size, notify) if file.size else b""
    digest = file.new_hasher()
    digest.update(content)
    if digest.hexdigest() != file.digest:
        raise DamagedModel(
            f"{file.path} of {listing.repo.repo} does not have the digest that the Hub announced",
            "try another network or HF_ENDPOINT",
        )
    return content


def pull(plan: PullPlan, progress: PullProgress) -> Path:
    """Download the missing files, and return the model's snapshot folder, or its GGUF file. Raises the errors of
    `fetch_files`."""
    fetch_files(plan, progress)
    return downloaded_path(plan.listing.repo, str(plan.listing.repo))


def fetch_files(plan: PullPlan, progress: PullProgress) -> None:
    """Download the missing files of a plan. After an error, the next pull resumes.

    Raises NetworkError, AccessDenied, DamagedModel, DiskFull.
    """
    listing, root = plan.listing, repo_root(plan.listing.repo.repo)
    check_disk(plan, root)
    progress.begin(plan)
    if cached_commit(listing.repo.repo, listing.repo.revision) is None:
        update_ref(listing, root)  # so that an aborted pull is recognized as such
    stop = Event()
    with thread_pool(CONNECTIONS) as connections, thread_pool(FILE_WORKERS) as files:
        transfer = FileTransfer(listing, connections, stop, progress.advance, progress.say)
        futures = [
            files.submit(_fetch_content, transfer, same, root, plan, progress) for same in plan.contents.values()
        ]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # also on Ctrl-C, which interrupts wait
        error = first_error(futures)
    if error:
        raise error
    save_digests(plan, root)
    update_ref(listing, root)


@contextmanager
def thread_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, and wait for them, except after Ctrl-C, as a silent connection may take seconds."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)
        pool.shutdown(wait=not interrupted, cancel_futures=interrupted)


def _fetch_content(
    transfer: FileTransfer, files: Sequence[RemoteFile], root: Path, plan: PullPlan, progress: PullProgress
) -> None:
    """Download one content, and link all files that have it."""
    names = [root / "snapshots" / plan.listing.commit / file.path for file in files]
    copy = next((name for name in names if is_complete_copy(name, files[0])), None)
    content = copy or transfer.fetch(files[0])
    with writing_cache(root):
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
            if not (name.exists() and name.samefile(content)) and not is_complete_copy(name, files[0]):
                # Private, but shared with other programs: it defines the layout on file systems without links.
                _create_symlink(str(content), str(name), new_blob=copy is None)
            if is_complete_copy(name, files[0]):  # without links, the blob has been moved here
                copy = content = name
    if plan.cached_bytes[files[0].digest] < files[0].size:
        progress.finish(files[0])


def is_complete_copy(name: Path, file: RemoteFile) -> bool:
    """Whether a snapshot contains the file itself rather than a link, as on file systems without links."""
    return not name.is_symlink() and is_complete(name, file)


def save_digests(plan: PullPlan, root: Path) -> None:
    """Record the digests of files that are not links to blobs, whose names would be the digests."""
    listing, folder = plan.listing, root / "snapshots" / plan.listing.commit
    copies = {file.path: file.digest for file in plan.files if is_complete_copy(folder / file.path, file)}
    if copies:
        with writing_cache(root):
            digests = read_digests(listing.repo.repo, listing.commit) | copies
            write_atomic(digests_file(listing.repo.repo, listing.commit), json.dumps(digests, indent=1))


def update_ref(listing: Listing, root: Path) -> None:
    """Point the branch or tag to the listing's commit."""
    revision = listing.repo.revision
    if cached_commit(listing.repo.repo, revision) == listing.commit or COMMIT.fullmatch(revision):
        return
    ref = root / "refs" / revision
    with writing_cache(root):
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = root / f"{uuid4().hex}.localllm"  # outside refs, where it would be a ref
        temporary.write_text(listing.commit)
        temporary.replace(ref)


def check_disk(plan: PullPlan, root: Path) -> None:
    """Raise DiskFull if the disk has too little space for the missing files."""
    folder = nearest_existing(root)
    free = shutil.disk_usage(folder).free
    if plan.missing_bytes and plan.missing_bytes + SPARE_BYTES > free:
        raise DiskFull(
            f"{plan.listing.repo} needs {format_bytes(plan.missing_bytes)} more on the disk with {folder}, and "
            f"{format_bytes(SPARE_BYTES)} in reserve, but {format_bytes(free)} are free",
            "delete files, or set HF_HUB_CACHE to a folder on another disk",
        )
