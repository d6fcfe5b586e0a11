"""Answers of the engine's thread, read on the event loop: no thread waits for any of them.

The engine hands over each piece as it comes (`LLM.submit`'s `deliver`); the loop wakes up and puts it in the queue
of the one who reads. Knows nothing of HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol

from localllm.request import GenerationEvent, Request

Said = GenerationEvent | BaseException


class Closing(Protocol):
    def close(self) -> None: ...


class Submitting(Protocol):
    """What is needed of an LLM."""

    def submit(self, request: Request, deliver: Callable[[Said], object]) -> Closing: ...


class Answers(AsyncIterator[tuple[int, GenerationEvent]]):
    """The pieces of one answer or of several together, each with the place of its request; the last of each has
    the finish_reason. Raises what went wrong with any.

    Leaving `with` cancels those that have not ended: their blocks are free before the engine's next step.
    """

    def __init__(self, llm: Submitting, requests: Sequence[Request], each: int = 1):
        """Begins to answer. On the event loop only. Raises LocalLLMError where the model was closed.

        each: so many of the requests that follow each other have one prompt. It is computed for the first of them;
        the others begin once they find it in the cache.
        """
        self.llm = llm
        self.requests = requests
        self.each = each
        self.loop = asyncio.get_running_loop()
        self.said: asyncio.Queue[tuple[int, Said]] = asyncio.Queue()
        self.streams: dict[int, Closing] = {}  # those that have not ended
        self.later = set(range(len(requests))) - set(range(0, len(requests), each))
        for place in range(0, len(requests), each):
            self.begin(place)

    def begin(self, place: int) -> None:
        self.streams[place] = self.llm.submit(self.requests[place], partial(self.deliver, place))

    def deliver(self, place: int, said: Said) -> None:
        """On the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended, and whoever read with it
            self.loop.call_soon_threadsafe(self.said.put_nowait, (place, said))

    async def __anext__(self) -> tuple[int, GenerationEvent]:
        if not self.streams:
            raise StopAsyncIteration
        place, said = await self.said.get()
        if isinstance(said, BaseException):
            raise said
        if said.finish_reason is not None:
            del self.streams[place]
        if self.later and (said.token_ids or said.finish_reason is not None):
            for waiting in self.later.intersection(range(place, place + self.each)):
                self.later.remove(waiting)
                self.begin(waiting)
        return place, said

    @property
    def more(self) -> bool:
        """Is a piece there already? Then what is made of this one may wait, to be sent together with it."""
        return not self.said.empty()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        while self.streams:
            self.streams.popitem()[1].close()
