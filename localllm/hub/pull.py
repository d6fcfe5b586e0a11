"""A model from the Hub into the Hugging Face cache, whole: where a program that uses that cache finds it.

The layout is that of `huggingface_hub`: contents in `blobs` under their digest, names in `snapshots` as links to
them, branches in `refs`. A branch moves to a new commit when all of that is here, so an old model stays whole.
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
from localllm.hub.folder import (
    COMPANION_FILES,
    INDEX_FILE,
    SINGLE_FILE,
    TEMPLATES_FOLDER,
    files_in_index,
    is_pickle,
    refuse_pickles,
)
from localllm.hub.gguf import choose_model, distinct_models, part_files
from localllm.hub.http import Say
from localllm.hub.listing import COMMIT, Listing, RemoteFile, fetch_listing
from localllm.hub.modules import MODULES_FILE, parse_modules
from localllm.hub.names import RepoName
from localllm.hub.partial import PARTIAL_SUFFIX, present_bytes
from localllm.hub.resolve import downloaded_path
from localllm.hub.store import blob_path, cached_commit, digests_file, nearest_existing, read_digests, repo_root
from localllm.hub.transfer import FileTransfer, first_error, is_complete, read_range, writing_cache

# Threads that wait for the network, and need not be waited for.


@contextmanager
def thread_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Waits for them at its end; not after Ctrl-C, because a connection that is silent has seconds to go."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        broken_off = isinstance(sys.exception(), KeyboardInterrupt)
        pool.shutdown(wait=not broken_off, cancel_futures=broken_off)


# Which files of a repository a model needs: one edition of its weights, and what stands beside them. Not README's
# pictures, the same weights as pickles, or for other programs.

ReadFile = Callable[[RemoteFile], bytes]  # the content of a small file


def select_files(listing: Listing, read: ReadFile) -> tuple[RemoteFile, ...]:
    """The files of the model that `listing.repo` names, weights last.

    Safetensors before GGUF where nobody asks for one of the GGUF models. Raises UnsupportedModel where there is
    nothing that can be run, ModelNotFound where several GGUF models could be meant, DamagedModel for an index that
    names strange files.
    """
    weights = _safetensors(listing, read) if listing.repo.quant is None else ()
    if weights:
        return (*_companion_files(listing), *_module_files(listing, read), *weights)
    models = distinct_models(PurePosixPath(file.path) for file in listing.files)
    if not models:
        _raise_unsupported(listing)
    chosen = choose_model(models, listing.repo.quant, listing.repo.repo)
    readme = listing.find("README.md")
    return (*([readme] if readme else []), *(_require_file(listing, str(part)) for part in part_files(chosen)))


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
            f"{listing.repo.repo} has no tokenizer that localllm reads ({', '.join(TOKENIZER_FILES)})",
            "use another edition of the model",
        )
    found = [file for name in COMPANION_FILES if (file := listing.find(name))]
    templates = [
        file for file in listing.files if PurePosixPath("/", file.path).match(f"/{TEMPLATES_FOLDER}/*.jinja")
    ]
    return [*found, tokenizer, *templates]


def _module_files(listing: Listing, read: ReadFile) -> list[RemoteFile]:
    """What an embedder has in folders of their own."""
    listed = listing.find(MODULES_FILE)
    modules = parse_modules(read(listed), PurePosixPath(listing.repo.repo, MODULES_FILE)) if listed else ()
    return [_require_file(listing, file) for module in modules for file in module.files]


def _require_file(listing: Listing, path: str) -> RemoteFile:
    if file := listing.find(path):
        return file
    raise UnsupportedModel(f"{listing.repo} lacks {path}, a part of its own weights", "use another edition of it")


def _raise_unsupported(listing: Listing) -> None:
    names = [file.path for file in listing.files]
    if listing.repo.quant is None:
        refuse_pickles(sorted(name for name in names if is_pickle(name)), listing.repo.repo)
    what = "GGUF files" if listing.repo.quant else "config.json with safetensors weights, and no GGUF file"
    raise UnsupportedModel(f"{listing.repo.repo} has no {what}", "use another edition of the model")


CONNECTIONS = 8  # at a time, for all files
FILE_WORKERS = 4  # at a time; each hashes what has come, with a core of its own
SMALL_BYTES = 64 * 2**20  # what is read into memory: configurations, indices
SPARE_BYTES = 64 * 2**20  # of the disk are left alone


@dataclass(frozen=True)
class PullPlan:
    """What a pull is going to do, before the first byte of it."""

    listing: Listing
    files: tuple[RemoteFile, ...]  # all that the model needs, weights last
    cached_bytes: dict[str, int]  # by digest, how many bytes need not come again

    @property
    def contents(self) -> dict[str, list[RemoteFile]]:
        """By digest, the files of that content: it comes once."""
        found: dict[str, list[RemoteFile]] = {}
        for file in self.files:
            found.setdefault(file.digest, []).append(file)
        return found

    @property
    def total_bytes(self) -> int:
        return sum(files[0].size for files in self.contents.values())

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - sum(self.cached_bytes.values())


class PullProgress(Protocol):
    """Follows a pull; its methods are called from several threads. What one raises ends the pull, and what came is
    kept."""

    def begin(self, plan: PullPlan, /) -> None: ...
    def advance(self, file: RemoteFile, count: int) -> None:
        """`count` bytes came; if it is negative, so many have to come again; 0: none did, and it goes on."""
        ...

    def finish(self, file: RemoteFile) -> None:
        """It is whole and verified."""
        ...

    def say(self, text: str) -> None: ...


def plan_pull(repo: RepoName, say: Say) -> PullPlan:
    """Ask the Hub what the model consists of, and look what of it is here.

    Raises ModelNotFound, AccessDenied, NetworkError, UnsupportedModel.
    """
    listing = fetch_listing(repo, say)
    return plan_files(listing, select_files(listing, lambda file: read_small(listing, file, say)))


def plan_files(listing: Listing, files: tuple[RemoteFile, ...]) -> PullPlan:
    """These files of the repository, and what of them is here."""
    here: dict[str, int] = {}
    for file in files:
        here[file.digest] = max(here.get(file.digest, 0), cached_bytes_of(file, listing))
    return PullPlan(listing, files, here)


def cached_bytes_of(file: RemoteFile, listing: Listing) -> int:
    """How much of it is in the cache."""
    blob = blob_path(listing.repo.repo, file.digest)
    name = repo_root(listing.repo.repo) / "snapshots" / listing.commit / file.path
    if is_complete(blob, file) or is_complete_copy(name, file):
        return file.size
    return present_bytes(blob.with_name(file.digest + PARTIAL_SUFFIX), file.size)


def pull(plan: PullPlan, progress: PullProgress) -> Path:
    """Fetch what is missing; gives the model's folder in the cache, or its GGUF file. Raises as `bring`."""
    fetch_files(plan, progress)
    return downloaded_path(plan.listing.repo, str(plan.listing.repo))


def fetch_files(plan: PullPlan, progress: PullProgress) -> None:
    """Fetch what is missing of any files.

    Raises NetworkError, AccessDenied, DamagedModel, DiskFull. What came is kept: the next pull goes on from there.
    """
    listing, root = plan.listing, repo_root(plan.listing.repo.repo)
    check_disk(plan, root)
    progress.begin(plan)
    if cached_commit(listing.repo.repo, listing.repo.revision) is None:
        update_ref(listing, root)  # so that what is broken off is seen as that
    end = Event()
    with thread_pool(CONNECTIONS) as connections, thread_pool(FILE_WORKERS) as files:
        transfer = FileTransfer(listing, connections, end, progress.advance, progress.say)
        coming = [
            files.submit(_fetch_content, transfer, same, root, plan, progress) for same in plan.contents.values()
        ]
        try:
            wait(coming, return_when=FIRST_EXCEPTION)
        finally:
            end.set()  # also for Ctrl-C, which arrives in wait
        fault = first_error(coming)
    if fault:
        raise fault
    keep_digests(plan, root)
    update_ref(listing, root)


def _fetch_content(
    transfer: FileTransfer, files: Sequence[RemoteFile], root: Path, plan: PullPlan, progress: PullProgress
) -> None:
    """Files of one content into the cache, under all their names."""
    names = [root / "snapshots" / plan.listing.commit / file.path for file in files]
    copy = next((name for name in names if is_complete_copy(name, files[0])), None)
    content = copy or transfer.fetch(files[0])
    with writing_cache(root):
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
            if not (name.exists() and name.samefile(content)) and not is_complete_copy(name, files[0]):
                # Private, but the only rule for file systems without links that other programs share.
                _create_symlink(str(content), str(name), new_blob=copy is None)
            if is_complete_copy(name, files[0]):  # there are no links here: the content has moved
                copy = content = name
    if plan.cached_bytes[files[0].digest] < files[0].size:
        progress.finish(files[0])


def is_complete_copy(name: Path, file: RemoteFile) -> bool:
    """On file systems without links the cache has contents under their names, and only there."""
    return not name.is_symlink() and is_complete(name, file)


def keep_digests(plan: PullPlan, root: Path) -> None:
    """Of files that are no links, whose digest their blob's name would tell."""
    listing, folder = plan.listing, root / "snapshots" / plan.listing.commit
    copies = {file.path: file.digest for file in plan.files if is_complete_copy(folder / file.path, file)}
    if copies:
        with writing_cache(root):
            known = read_digests(listing.repo.repo, listing.commit) | copies
            write_atomic(digests_file(listing.repo.repo, listing.commit), json.dumps(known, indent=1))


def update_ref(listing: Listing, root: Path) -> None:
    """Let the branch or tag stand for this commit."""
    revision = listing.repo.revision
    if cached_commit(listing.repo.repo, revision) == listing.commit or COMMIT.fullmatch(revision):
        return
    ref = root / "refs" / revision
    with writing_cache(root):
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = root / f"{uuid4().hex}.localllm"  # not in refs, where it would be one, nor another process's
        new.write_text(listing.commit)
        new.replace(ref)


def check_disk(plan: PullPlan, root: Path) -> None:
    """Raises DiskFull where what is missing does not fit on the disk."""
    folder = nearest_existing(root)
    free = shutil.disk_usage(folder).free
    if plan.missing_bytes and plan.missing_bytes + SPARE_BYTES > free:
        raise DiskFull(
            f"{plan.listing.repo} needs {format_bytes(plan.missing_bytes)} more on the disk with {folder}, and "
            f"{format_bytes(SPARE_BYTES)} to spare, {format_bytes(free)} are free",
            "make room, or set HF_HUB_CACHE to a folder on another disk",
        )


def read_small(listing: Listing, file: RemoteFile, say: Say) -> bytes:
    """The verified content of a configuration or an index. Raises as `pull`."""
    if file.size > SMALL_BYTES:
        raise NetworkError(f"{file.path} of {listing.repo} has {file.size} bytes", "use another edition of it")
    content = read_range(listing, file, 0, file.size, say) if file.size else b""
    digest = file.new_hasher()
    digest.update(content)
    if digest.hexdigest() != file.digest:
        raise DamagedModel(
            f"{file.path} of {listing.repo.repo} came with another content than the hub announced",
            "try another network or HF_ENDPOINT",
        )
    return content
