"""One file of the Hub into the cache: in parts, several at once, resumed, and verified as it is written.

Knows nothing of models, nor of which files one needs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
from filelock import Timeout
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import WeakFileLock

from localllm import files
from localllm.errors import DamagedModel, NetworkError
from localllm.hub.hf_cache import blob_path, repo_root
from localllm.hub.http import Say, get_range, is_retriable, retrying, translate_errors
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.partial_file import PARTIAL_SUFFIX, Part, PartialFile

# A span of bytes of one file on the Hub: asked for again until all of it came, checked as far as headers tell.

CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def fetch_range(
    listing: Listing, file: RemoteFile, part: Part, write: Callable[[bytes], None], say: Say, end: Event
) -> None:
    """Fetch what the part is missing. `write` takes the bytes as they come and counts them in `part.done`; it may
    raise to break off; setting `end` does, too, without a word, before the next request.

    Raises NetworkError, AccessDenied, ModelNotFound.
    """
    with translate_errors(listing.repo):
        while part.missing and not end.is_set():
            retrying(file.path, say, end)(_fetch_once, listing, file, part, write)


def read_range(listing: Listing, file: RemoteFile, begin: int, end: int, say: Say) -> bytes:
    """Bytes `begin` up to, not with, `end`, in memory. Raises as `fetch_range`."""
    part, content = Part(0, begin, end, 0), bytearray()

    def write(piece: bytes) -> None:
        content.extend(piece)
        part.done += len(piece)

    fetch_range(listing, file, part, write, say, Event())
    return bytes(content)


def _fetch_once(listing: Listing, file: RemoteFile, part: Part, write: Callable[[bytes], None]) -> None:
    """One request. A connection that breaks is a fault only if nothing came."""
    before = part.done
    url = hf_hub_url(listing.repo.repo, file.path, revision=listing.commit)
    try:
        with get_range(url, part.begin + part.done, part.end) as response:
            for content in _missing_chunks(response, part, file):
                write(content)
        if part.done == before:
            raise httpx2.RemoteProtocolError("the answer is empty")
    except httpx2.TransportError as error:
        if part.done == before or not is_retriable(error):
            raise


def _missing_chunks(response: httpx2.Response, part: Part, file: RemoteFile) -> Iterator[bytes]:
    """Of a body, the bytes that the part is missing. Without ranges, a server sends the file from its begin."""
    begin, skip = part.begin + part.done, 0
    if response.status_code == httpx2.codes.PARTIAL_CONTENT:
        stated = response.headers.get("Content-Range", "no range")
        said = CONTENT_RANGE.fullmatch(stated)
        if not said or int(said[1]) != begin or said[3] not in (str(file.size), "*"):
            raise _unexpected_range(file, f"{stated[:60]} and not bytes {begin}-{part.end - 1}/{file.size}")
    else:
        skip, length = begin, response.headers.get("Content-Length", str(file.size))
        if length != str(file.size):
            raise _unexpected_range(file, f"{length[:20]} bytes and not {file.size}")
    for content in response.iter_raw():
        skipped = min(skip, len(content))
        skip -= skipped
        if content := content[skipped : skipped + part.missing]:
            yield content
        if not part.missing:
            return


def _unexpected_range(file: RemoteFile, what: str) -> NetworkError:
    return NetworkError(
        f"the hub sends of {file.path} {what}", "try again; if it stays so, set another HF_ENDPOINT"
    )


LOCK_POLL_S = 0.5


class Interrupted(Exception):
    """The person, or the fault of another file, ended it."""


@dataclass(frozen=True)
class FileTransfer:
    """What all files of one pull share."""

    listing: Listing
    connections: Executor
    stop: Event  # set to break off
    # Bytes that came; negative ones have to come again; none: it goes on. What it raises ends the pull.
    on_progress: Callable[[RemoteFile, int], None]
    say: Say

    def fetch(self, file: RemoteFile) -> Path:
        """The file's blob in the cache, whole and verified; fetched unless it is there.

        Where another process fetches it, waits for that one. Raises NetworkError, AccessDenied, DamagedModel,
        DiskFull, and Interrupted.
        """
        root = repo_root(self.listing.repo.repo)
        blob = blob_path(self.listing.repo.repo, file.digest)
        if is_complete(blob, file):
            return blob
        with writing_cache(root):
            blob.parent.mkdir(parents=True, exist_ok=True)
            lock = root.parent / ".locks" / root.name / f"{file.digest}.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(lock, file):
                if not is_complete(blob, file):
                    with PartialFile(blob.with_name(file.digest + PARTIAL_SUFFIX), file.size) as partial:
                        self._fill(partial, file)
                        partial.finish(blob)
        return blob

    @contextmanager
    def _locked(self, lock: Path, file: RemoteFile) -> Iterator[None]:
        """The lock that `huggingface_hub` takes, too."""
        told_so = False
        while True:
            try:
                with WeakFileLock(lock, timeout=LOCK_POLL_S):
                    yield
                return
            except Timeout:
                if not told_so:
                    self.say(f"{file.path}: another process is fetching it, waiting for that one")
                told_so = True
                self.check_stop()
                self.on_progress(file, 0)

    def _fill(self, partial: PartialFile, file: RemoteFile) -> None:
        for attempt in ("first", "last"):
            if self._fetch_parts(partial, file) == file.digest:
                return
            self.on_progress(file, -partial.done)
            partial.discard()
            if attempt == "first":
                self.say(f"{file.path}: what came is not what the hub announced, fetching it again")
        raise DamagedModel(
            f"{file.path} of {self.listing.repo.repo} came twice with another content than the hub announced",
            "try another network or HF_ENDPOINT",
        )

    def _fetch_parts(self, partial: PartialFile, file: RemoteFile) -> str:
        """Fetch what is missing, and give the digest of the whole. Hashing follows the parts in their order."""
        digest, failed = file.new_hasher(), Event()
        coming = [self.connections.submit(self._fetch_part, partial, part, file, failed) for part in partial.parts]
        try:
            for part, future in zip(partial.parts, coming, strict=True):
                future.result()
                for content in partial.read(part):
                    self.check_stop()
                    self.on_progress(file, 0)  # of a file that is here the most part nothing else would tell
                    digest.update(content)
        except (Interrupted, CancelledError):
            raise first_error(coming) or Interrupted from None
        finally:
            failed.set()
            first_error(coming)  # none writes any more when the file is closed
        return digest.hexdigest()

    def _fetch_part(self, partial: PartialFile, part: Part, file: RemoteFile, failed: Event) -> None:
        def write(content: bytes) -> None:
            partial.write(part, content)
            self.on_progress(file, len(content))
            self.check_stop(failed)

        try:
            self.check_stop(failed)
            fetch_range(self.listing, file, part, write, self.say, self.stop)
            self.check_stop()  # it may have been broken off
        except BaseException:
            failed.set()
            raise

    def check_stop(self, failed: Event | None = None) -> None:
        if self.stop.is_set() or (failed and failed.is_set()):
            raise Interrupted


def is_complete(blob: Path, file: RemoteFile) -> bool:
    """By its size; `verify` looks at the content."""
    return blob.is_file() and blob.stat().st_size == file.size


def first_error(futures: Sequence[Future[Any]]) -> BaseException | None:
    """Cancel what has not begun, wait for what has, and give what went wrong of its own accord."""
    for future in futures:
        future.cancel()
    faults = [future.exception() for future in futures if not future.cancelled()]
    return next((fault for fault in faults if fault and not isinstance(fault, Interrupted)), None)


def writing_cache(root: Path) -> AbstractContextManager[None]:
    """Of a repository's folder in the cache: as `files.writing`."""
    return files.explain_disk_errors(root, "set HF_HUB_CACHE to a folder that can", resumable=True)
