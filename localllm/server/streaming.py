"""Streamed responses, as server-sent events or as NDJSON, and work that ends when the client disconnects."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from json.encoder import encode_basestring
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
SSE_DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

T = TypeVar("T")


class StreamResponse(StreamingResponse):
    """Sends chunks as they are made. A client that disconnects ends their generator, wherever it waits.

    An error that the generator raises before its first chunk is raised before anything is sent, so that the
    response gets the error's status.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        lease: AbstractContextManager[Any],
        media_type: str = EVENT_STREAM,
    ):
        """lease: exited after the last chunk, even if the generator never started."""
        super().__init__(chunks, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self.chunks = chunks
        self.lease = lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.lease:
            async with aclosing(self.chunks):
                first = await run_until_disconnect(Request(scope, receive), self.first_chunk())
                async with aclosing(self.all_chunks(first)) as self.body_iterator:
                    await super().__call__(scope, receive, send)

    async def first_chunk(self) -> bytes:
        return await anext(self.chunks, b"")

    async def all_chunks(self, first: bytes) -> AsyncGenerator[bytes]:
        yield first
        async for chunk in self.chunks:
            yield chunk


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T:
    """Result of `work`. If the client disconnects, cancel it and raise ClientDisconnect, unless it ends within
    `grace_s`."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if grace_s and not working.done():
            await asyncio.wait((working,), timeout=grace_s)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sse_event(value: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event, with an event type if `name` is not empty."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + json_bytes(value) + b"\n\n"


def ndjson_line(value: Mapping[str, Any]) -> bytes:
    """One line of NDJSON."""
    return json_bytes(value) + b"\n"


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8, which has no line breaks. Raises ValueError for NaN and infinity."""
    return ENCODER.encode(value).encode()


class TextTemplate:
    """A server-sent event in which only one text changes: all other JSON is written once.

    A token costs a tenth of what `sse_event` costs, with the same bytes.
    """

    def __init__(self, make: Callable[[str], Mapping[str, Any]]):
        """make: returns the event's object with a text, at one or several positions."""
        marker = secrets.token_hex(16)
        self.parts = sse_event(make(marker)).split(f'"{marker}"'.encode())

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return encode_basestring(text).encode().join(self.parts)
