"""Faults between a hub and its client, as changes of one answer; `loopback` sends them."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.hub.answers import End, Reply

Change = Callable[[Reply], Reply | None]
"""From an answer as it should be to what is sent instead; None where it is not this answer that is meant."""


@dataclass
class Fault:
    change: Change
    match: str
    method: str | None  # None: any
    times: int | None  # None: always
    met: int = 0  # how often so far

    def means(self, method: str, target: str) -> bool:
        left = self.times is None or self.met < self.times
        return left and self.method in (None, method) and re.search(self.match, target) is not None


def reset(at: int) -> Change:
    """Reset the connection at byte `at` of the file."""
    return _cut(at, End.RESET)


def truncated(at: int) -> Change:
    """Close the connection at this byte, before the end according to Content-Length."""
    return _cut(at, End.CLOSE)


def stalled(at: int) -> Change:
    """Stop sending at this byte, and keep the connection open."""
    return _cut(at, End.STALL)


def _cut(at: int, end: End) -> Change:
    return lambda r: replace(r, body=r.body[: at - r.offset], end=end) if _has(r, at) else None


def _has(reply: Reply, at: int) -> bool:
    return reply.offset <= at < reply.offset + len(reply.body)


def silent(reply: Reply) -> Reply:
    """Accept the connection, and send nothing."""
    return replace(reply, status=0, body=b"", end=End.STALL)


def flipped(at: int) -> Change:
    """Flip one bit of byte `at` of the file."""

    def change(reply: Reply) -> Reply | None:
        here = at - reply.offset
        byte = bytes([reply.body[here] ^ 1]) if _has(reply, at) else None
        return replace(reply, body=reply.body[:here] + byte + reply.body[here + 1 :]) if byte else None

    return change


def longer(extra: bytes) -> Change:
    """Append bytes to the body, with a matching Content-Length."""

    def change(reply: Reply) -> Reply | None:
        body = reply.body + extra
        return (
            replace(reply, body=body, headers={**reply.headers, "Content-Length": str(len(body))})
            if reply.body
            else None
        )

    return change


def ranges_ignored(reply: Reply) -> Reply | None:
    """Reply with the complete file instead of the requested range."""
    if reply.status != 206:
        return None
    headers = {name: value for name, value in reply.headers.items() if name != "Content-Range"}
    return Reply.of(200, reply.file, headers, file=reply.file)


def announced(size: int) -> Change:
    """Declare another size of the file in X-Linked-Size and in the total of Content-Range."""

    def change(reply: Reply) -> Reply | None:
        headers = dict(reply.headers)
        if "X-Linked-Size" in headers:
            headers["X-Linked-Size"] = str(size)
        if "Content-Range" in headers:
            headers["Content-Range"] = f"{headers['Content-Range'].partition('/')[0]}/{size}"
        return replace(reply, headers=headers) if headers != reply.headers else None

    return change


def headed(headers: Mapping[str, str | None]) -> Change:
    """Change headers; None removes one."""
    return lambda r: replace(r, headers={k: v for k, v in {**r.headers, **headers}.items() if v is not None})


def redirected(location: str) -> Change:
    """Redirect to another location, with the same headers; `?` redirects to itself endlessly."""
    return lambda r: Reply.of(302, headers={**r.headers, "Location": location})


def refused(status: int, code: str | None = None, message: str | None = None, **headers: str) -> Change:
    """Reply with an error and the Hub's error code: RepoNotFound, RevisionNotFound, EntryNotFound or GatedRepo."""
    return lambda _: Reply.refusal(status, code, message, **headers)


def busy(retry_after: int | None = None) -> Change:
    """Reply with 429, with or without a Retry-After in seconds."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return refused(429, None, "We had to rate limit you.", **headers)


def edited(edit: Callable[[Any], object]) -> Change:
    """Change the JSON of a reply with `edit`, which works in place."""

    def change(reply: Reply) -> Reply:
        facts = json.loads(reply.body)
        edit(facts)
        return Reply.json(facts, reply.headers)

    return change
