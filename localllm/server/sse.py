"""Answers on their way to a client that may leave: streams of events, and whole answers that are waited for."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event. JSON has no line ends of its own."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events as they come. A client that leaves ends the generator that makes them, wherever it waits.

    lease: is left at the end, also where the generator never began.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        lease: AbstractContextManager[Any],
        media_type: str = "text/event-stream",
    ):
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self.events = events
        self.lease = lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.lease:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.events):
            await super().stream_response(send)


async def unless_gone(request: Request, making: Coroutine[Any, Any, T]) -> T:
    """What `making` gives. Once the client has left, it is cancelled and ClientDisconnect raised."""
    made, gone = asyncio.ensure_future(making), asyncio.ensure_future(departure(request))
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


async def departure(request: Request) -> None:
    """Comes back when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
