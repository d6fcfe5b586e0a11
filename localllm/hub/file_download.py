"""Downloads one file from the Hub into the cache: in parts, several at a time, resumed, and verified on the
way."""

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

from localllm.errors import DamagedModel, NetworkError
from localllm.files import explain_disk_errors
from localllm.hub.hf_cache import blob_path, repo_root
from localllm.hub.http import Notify, get_range, is_retriable, retrying, translate_errors
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.partial_file import PARTIAL_SUFFIX, Part, PartialFile

LOCK_POLL_S = 0.5
CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class Interrupted(Exception):
    """The user, or an error in another file, stopped the download."""


@dataclass(frozen=True)
class FileTransfer:
    """The state that all downloads of a pull share."""

    listing: Listing
    connections: Executor
    stop: Event  # set to abort
    # Called with downloaded bytes; negative: they must be downloaded again; 0: still working. May raise to abort.
    on_progress: Callable[[RemoteFile, int], None]
    notify: Notify

    def fetch(self, file: RemoteFile) -> Path:
        """Return the file's blob in the cache, complete and verified, and download it if it is missing.

        Waits if another process is downloading it. Raises NetworkError, AccessDenied, DamagedModel, DiskFull,
        Interrupted.
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
        """Hold the lock that `huggingface_hub` takes for the same blob."""
        notified = False
        while True:
            try:
                with WeakFileLock(lock, timeout=LOCK_POLL_S):
                    yield
                return
            except Timeout:
                if not notified:
                    self.notify(f"{file.path}: another process is fetching it, waiting for that one")
                notified = True
                self.check_stop()
                self.on_progress(file, 0)

    def _fill(self, partial: PartialFile, file: RemoteFile) -> None:
        for attempt in ("first", "last"):
            if self._fetch_parts(partial, file) == file.digest:
                return
            self.on_progress(file, -partial.done)
            partial.discard()
            if attempt == "first":
                self.notify(f"{file.path}: the content does not have the announced digest, fetching it again")
        raise DamagedModel(
            f"{file.path} of {self.listing.repo.repo} twice had a digest other than the Hub's",
            "try another network or HF_ENDPOINT",
        )

    def _fetch_parts(self, partial: PartialFile, file: RemoteFile) -> str:
        """Download the missing parts, and return the digest of the file, which is hashed in order meanwhile."""
        digest, failed = file.new_hasher(), Event()
        futures = [
            self.connections.submit(self._fetch_part, partial, part, file, failed) for part in partial.parts
        ]
        try:
            for part, future in zip(partial.parts, futures, strict=True):
                future.result()
                for content in partial.read(part):
                    self.check_stop()
                    self.on_progress(file, 0)  # no other progress while existing parts are hashed
                    digest.update(content)
        except (Interrupted, CancelledError):
            raise first_error(futures) or Interrupted from None
        finally:
            failed.set()
            first_error(futures)  # waits, so that no thread writes after the file is closed
        return digest.hexdigest()

    def _fetch_part(self, partial: PartialFile, part: Part, file: RemoteFile, failed: Event) -> None:
        def write(content: bytes) -> None:
            partial.write(part, content)
            self.on_progress(file, len(content))
            self.check_stop(failed)

        try:
            self.check_stop(failed)
            fetch_range(self.listing, file, part, write, self.notify, self.stop)
            self.check_stop()  # fetch_range returns early when stopped
        except BaseException:
            failed.set()
            raise

    def check_stop(self, failed: Event | None = None) -> None:
        if self.stop.is_set() or (failed and failed.is_set()):
            raise Interrupted


def fetch_range(
    listing: Listing, file: RemoteFile, part: Part, write: Callable[[bytes], None], notify: Notify, stop: Event
) -> None:
    """Download the missing bytes of a part, with retries. Returns early, without an error, when `stop` is set.

    write: receives the bytes, adds them to `part.done`, and may raise to abort. Raises NetworkError, AccessDenied,
    ModelNotFound.
    """
    with translate_errors(listing.repo):
        while part.missing and not stop.is_set():
            retrying(file.path, notify, stop)(_fetch_once, listing, file, part, write)


def read_range(listing: Listing, file: RemoteFile, begin: int, end: int, notify: Notify) -> bytes:
    """Return bytes `begin` to `end` (exclusive) of a file. Raises the errors of `fetch_range`."""
    part, content = Part(0, begin, end, 0), bytearray()

    def write(received: bytes) -> None:
        content.extend(received)
        part.done += len(received)

    fetch_range(listing, file, part, write, notify, Event())
    return bytes(content)


def _fetch_once(listing: Listing, file: RemoteFile, part: Part, write: Callable[[bytes], None]) -> None:
    """Send one request. A broken connection is an error only if it delivered nothing."""
    done_before = part.done
    url = hf_hub_url(listing.repo.repo, file.path, revision=listing.commit)
    try:
        with get_range(url, part.begin + part.done, part.end) as response:
            for content in _missing_chunks(response, part, file):
                write(content)
        if part.done == done_before:
            raise httpx2.RemoteProtocolError("the response is empty")
    except httpx2.TransportError as error:
        if part.done == done_before or not is_retriable(error):
            raise


def _missing_chunks(response: httpx2.Response, part: Part, file: RemoteFile) -> Iterator[bytes]:
    """Yield the missing bytes of a part from a response: a range, or the whole file from servers without ranges.

    Raises NetworkError if the headers state another range or size.
    """
    begin, skip = part.begin + part.done, 0
    if response.status_code == httpx2.codes.PARTIAL_CONTENT:
        header = response.headers.get("Content-Range", "no range")
        match = CONTENT_RANGE.fullmatch(header)
        if not match or int(match[1]) != begin or match[3] not in (str(file.size), "*"):
            raise _unexpected_range(file, header[:60], f"bytes {begin}-{part.end - 1}/{file.size}")
    else:
        skip, length = begin, response.headers.get("Content-Length", str(file.size))
        if length != str(file.size):
            raise _unexpected_range(file, f"{length[:20]} bytes", str(file.size))
    for content in response.iter_raw():
        skipped = min(skip, len(content))
        skip -= skipped
        if content := content[skipped : skipped + part.missing]:
            yield content
        if not part.missing:
            return


def _unexpected_range(file: RemoteFile, received: str, expected: str) -> NetworkError:
    return NetworkError(
        f"the Hub sends {received} of {file.path} instead of {expected}",
        "try again; if the error persists, set another HF_ENDPOINT",
    )


def is_complete(blob: Path, file: RemoteFile) -> bool:
    """Whether a blob has the size of the file; `verify` checks the content."""
    return blob.is_file() and blob.stat().st_size == file.size


def first_error(futures: Sequence[Future[Any]]) -> BaseException | None:
    """Cancel pending futures, wait for running ones, and return the first error that caused the others to stop."""
    for future in futures:
        future.cancel()
    errors = [future.exception() for future in futures if not future.cancelled()]
    return next((error for error in errors if error and not isinstance(error, Interrupted)), None)


def writing_cache(root: Path) -> AbstractContextManager[None]:
    """Translate disk errors as `explain_disk_errors`, for a repository's folder in the cache."""
    return explain_disk_errors(root, "set HF_HUB_CACHE to a folder that can", resumable=True)
