"""Streams of JSON objects, one a line, as Ollama's API sends them."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

# What became of models, and why: the newest entries, and a line of the log each.
MAX_EVENTS = 200
log = logging.getLogger("localllm.models")

ModelEventType = Literal["loaded", "unloaded", "resized", "failed"]


@dataclass(frozen=True)
class ModelEvent:
    what: ModelEventType
    model: str
    why: str
    seconds: float | None = None  # that it took
    at: float = field(default_factory=time.time)  # seconds since 1970


class ModelEventLog:
    def __init__(self) -> None:
        self.recent: deque[ModelEvent] = deque(maxlen=MAX_EVENTS)
        self.counts: dict[ModelEventType, int] = {"loaded": 0, "unloaded": 0, "resized": 0, "failed": 0}

    def __iter__(self) -> Iterator[ModelEvent]:
        """The oldest first."""
        return iter(self.recent)

    def add(self, what: ModelEventType, model: str, why: str, seconds: float | None = None) -> None:
        self.recent.append(ModelEvent(what, model, why, seconds))
        self.counts[what] += 1
        took = {} if seconds is None else {"seconds": round(seconds, 3)}
        log.info(what, extra={"fields": {"event": what, "model": model, "why": why, **took}})


# Answers on their way to a client that may leave: streams of events, and whole answers that are waited for.
T = TypeVar("T")

SSE_DONE = b"data: [DONE]\n\n"


def sse_event(value: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event. JSON has no line ends of its own."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class StreamResponse(StreamingResponse):
    """Sends events as they come. A client that leaves ends the generator that makes them, wherever it waits.

    What the generator raises before its first event is raised before anything is sent: it has a status of its own.

    lease: is left at the end, also where the generator never began.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        lease: AbstractContextManager[Any],
        media_type: str = "text/event-stream",
    ):
        super().__init__(chunks, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self.chunks = chunks
        self.lease = lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.lease:
            async with aclosing(self.chunks):
                first = await run_until_disconnect(Request(scope, receive), self.first_chunk())
                async with aclosing(self.remaining_chunks(first)) as self.body_iterator:
                    await super().__call__(scope, receive, send)

    async def first_chunk(self) -> bytes:
        return await anext(self.chunks, b"")

    async def remaining_chunks(self, first: bytes) -> AsyncGenerator[bytes]:
        yield first
        async for piece in self.chunks:
            yield piece


async def run_until_disconnect(request: Request, making: Coroutine[Any, Any, T]) -> T:
    """What `making` gives. Once the client has left, it is cancelled and ClientDisconnect raised."""
    made, gone = asyncio.ensure_future(making), asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait((made, gone), return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ClientDisconnect
        return made.result()
    finally:
        for task in (made, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def wait_for_disconnect(request: Request) -> None:
    """Comes back when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


NDJSON = "application/x-ndjson"


def ndjson_line(value: Mapping[str, Any]) -> bytes:
    """JSON has no line ends of its own."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def ndjson_response(made: AsyncGenerator[bytes], lease: AbstractContextManager[Any]) -> StreamResponse:
    """lease: as of `EventStream`."""
    return StreamResponse(made, lease, NDJSON)
