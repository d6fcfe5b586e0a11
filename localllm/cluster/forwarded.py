"""The properties of a request by which a front chooses a replica: the beginning of its prompt, and the replica
that holds a response or slot that it refers to, if any."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from starlette.types import Scope

from localllm.server.guard import KEY, UNAUTHENTICATED

PIECE = 128  # characters by which beginnings of prompts differ
MAX_PIECES = 256  # prompts that are equal up to here go to the same replica
DIGEST_BYTES = 12
THREAD_BYTES = 256 * 2**10  # of a body; larger ones are parsed outside the event loop
PROMPT_FIELDS = ("model", "tools", "system", "instructions", "prefix", "suffix", "prompt", "messages", "input")
"""In the order in which most templates write them. Field names are hashed too, so that each API has its own names:
templates differ between the APIs' formats as well."""

SCOPE_FIELDS = (
    "type",
    "http_version",
    "method",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
    "scheme",
    KEY,
    UNAUTHENTICATED,
)
RESPONSE_PATH = re.compile(r"/v1/responses/(?P<id>resp_[0-9a-f]+)(/.*)?")
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')
SLOT_PATH = re.compile(r"/slots/(?P<id>\d+)")


@dataclass
class ForwardedRequest:
    """A request for a replica."""

    scope: dict[str, Any]
    body: bytes
    names: tuple[bytes, ...] = ()
    """Names of the beginnings of its prompt, the shortest first."""

    share: float = 1.0
    """Share of the prompt that the longest of them covers, roughly."""

    is_bound: bool = False
    """Whether only the replica that owns the last name can answer."""

    avoid: set[str] = field(default_factory=set[str])
    """Replicas that have failed, by id."""

    chosen: str = ""
    """Replica that it was sent to, by id, if it has not answered."""

    number: int = 0
    """Identifies the request to a router and its front, which has another copy of it."""


async def read_request(scope: Scope, body: bytes, cache_scope: str, client: str) -> ForwardedRequest:
    """Prepare a request. cache_scope: requests with another one find nothing in its replica's prefix cache;
    client: whose slots it may name"""
    sent = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
    sent |= {"root_path": "", "asgi": {"version": "3.0"}, "headers": [tuple(pair) for pair in scope["headers"]]}
    if bound := bound_name(scope["path"], {}, client):
        return ForwardedRequest(sent, body, (bound,), is_bound=True)
    if scope["method"] != "POST" or not body:
        return ForwardedRequest(sent, body)
    fields = await asyncio.to_thread(parse, body) if len(body) > THREAD_BYTES else parse(body)
    if bound := bound_name(scope["path"], fields, client):
        return ForwardedRequest(sent, body, (bound,), is_bound=True)
    names = tuple(prefix_names(fields, cache_scope))
    share = min(1.0, PIECE * MAX_PIECES / len(body)) if len(names) == MAX_PIECES else 1.0
    return ForwardedRequest(sent, body, names, share)


def parse(body: bytes) -> Mapping[str, Any]:
    """The fields of a body; none if it is no JSON object, which the replica refuses."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def prefix_names(fields: Mapping[str, Any], cache_scope: str) -> list[bytes]:
    """Names of all beginnings of a prompt in whole pieces, each hashed with the one before.

    A beginning shorter than a piece has none: it is computed faster than it is found.
    """
    text, max_chars = "", PIECE * MAX_PIECES
    for name in PROMPT_FIELDS:
        if fields.get(name) and len(text) < max_chars:
            text += f"{name}:{flatten(fields[name], max_chars - len(text))}"
    names, digest = list[bytes](), cache_scope.encode()
    for at in range(0, min(len(text), max_chars) - PIECE + 1, PIECE):
        piece = text[at : at + PIECE].encode(errors="surrogatepass")
        digest = blake2b(digest + piece, digest_size=DIGEST_BYTES).digest()
        names.append(digest)
    return names


def flatten(value: Any, max_chars: int) -> str:
    """The beginning of a value as text of about `max_chars`, such that a longer list begins as a shorter
    one."""
    if isinstance(value, str):
        return value[:max_chars]
    if isinstance(value, list):
        text = ""
        for item in value:
            if len(text) >= max_chars:
                break
            text += flatten(item, max_chars - len(text)) + ","
        return text
    if isinstance(value, dict):
        return "".join(f"{name}:{flatten(item, max_chars)};" for name, item in value.items())[:max_chars]
    return str(value)


def bound_name(path: str, fields: Mapping[str, Any], client: str) -> bytes | None:
    """A name of what a request needs that only one replica has: an earlier response, or a slot."""
    if match := RESPONSE_PATH.fullmatch(path):
        return response_name(match["id"])
    if isinstance(previous := fields.get("previous_response_id"), str):
        return response_name(previous)
    if match := SLOT_PATH.fullmatch(path):
        return slot_name(match["id"], client)
    if isinstance(slot := fields.get("id_slot"), int) and slot >= 0:
        return slot_name(str(slot), client)
    return None


def response_name(response_id: str) -> bytes:
    return b"response:" + response_id.encode(errors="replace")[:100]


def slot_name(number: str, client: str) -> bytes:
    return f"slot:{client}:{number}".encode()[:100]
