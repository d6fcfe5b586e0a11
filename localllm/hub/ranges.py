"""A span of bytes of one file on the Hub: asked for again until all of it came, checked as far as headers tell."""

import re
from collections.abc import Callable, Iterator
from threading import Event

import httpx2
from huggingface_hub import hf_hub_url

from localllm.errors import NetworkError
from localllm.hub.http import Say, get_range, is_retriable, retrying, translate_errors
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.partial import Part

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
