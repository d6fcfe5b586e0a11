"""Answers of the engine's thread, read on the event loop: no thread waits for any of them.

The engine hands over each piece as it comes (`LLM.submit`'s `deliver`); the loop wakes up and puts it in the queue
of the one who reads. Knows nothing of HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Protocol

from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, Request
from localllm.server.account import CANCELLED, FAILED, current

Said = GenerationEvent | BaseException

MOST_UNREAD = 2**19  # what may wait for one reader, as `weight` has it: some 60 MB
PIECE = 8  # how much more memory a piece takes than one log probability


class Closing(Protocol):
    def close(self) -> None: ...


class Decoding(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class Submitting(Protocol):
    """What is needed of an LLM."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Decoding: ...
    def submit(self, request: Request, deliver: Callable[[Said], object]) -> Closing: ...


class NotRead(LocalLLMError):
    """An answer that waits for a reader who takes none of it."""

    http_status = 408


class Answers(AsyncIterator[tuple[int, GenerationEvent]]):
    """The pieces of one answer or of several together, each with the place of its request; the last of each has
    the finish_reason. Raises what went wrong with any. How each ended goes into the account of the HTTP request.

    Leaving `with` cancels those that have not ended: their blocks are free before the engine's next step. So does
    leaving too much unread.
    """

    def __init__(
        self, llm: Submitting, requests: Sequence[Request], each: int = 1, most_unread: int = MOST_UNREAD
    ):
        """Begins to answer. On the event loop only. Raises Busy where too many wait, and LocalLLMError where the
        model was closed; then none of them goes on.

        each: so many of the requests that follow each other have one prompt. It is computed for the first of them;
        the others begin once they find it in the cache.
        """
        self.unread, self.most_unread, self.given_up = 0, most_unread, False
        self.llm = llm
        self.requests = requests
        self.each = each
        self.account = current()
        self.tokens: dict[int, int] = {}  # so far, of those that have not ended
        if self.account and self.account.with_prompts:
            self.account.prompts += [llm.tokenizer.decode(request.prompt_ids) for request in requests[::each]]
        self.loop = asyncio.get_running_loop()
        self.said: asyncio.Queue[tuple[int, Said]] = asyncio.Queue()
        self.streams: dict[int, Closing] = {}  # those that have not ended
        self.later = set(range(len(requests))) - set(range(0, len(requests), each))
        with ExitStack() as undo:
            undo.push(self)
            for place in range(0, len(requests), each):
                self.begin(place)
            undo.pop_all()

    def begin(self, place: int) -> None:
        self.streams[place] = self.llm.submit(self.requests[place], partial(self.deliver, place))

    def deliver(self, place: int, said: Said) -> None:
        """On the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended, and whoever read with it
            self.loop.call_soon_threadsafe(self.keep, place, said)

    def keep(self, place: int, said: Said) -> None:
        """For the reader, unless too much waits for him: then answering ends, and what waits is still told."""
        if self.given_up:
            return
        self.unread += weight(said)
        self.given_up = self.unread > self.most_unread
        if self.given_up:
            said = NotRead("nobody reads the answer as fast as it comes", "read it faster")
            for stream in self.streams.values():
                stream.close()
        self.said.put_nowait((place, said))

    async def __anext__(self) -> tuple[int, GenerationEvent]:
        if not self.streams:
            raise StopAsyncIteration
        place, said = await self.said.get()
        self.unread -= weight(said)
        if isinstance(said, BaseException):
            self.end(place, FAILED)
            raise said
        self.tokens[place] = self.tokens.get(place, 0) + len(said.token_ids)
        if said.finish_reason is not None:
            self.end(place, said.finish_reason, said.metrics)
        if self.later and (said.token_ids or said.finish_reason is not None):
            for waiting in self.later.intersection(range(place, place + self.each)):
                self.later.remove(waiting)
                self.begin(waiting)
        return place, said

    @property
    def more(self) -> bool:
        """Is a piece there already? Then what is made of this one may wait, to be sent together with it."""
        return not self.said.empty()

    def end(self, place: int, why: str, metrics: Metrics | None = None) -> None:
        self.streams.pop(place).close()
        tokens = self.tokens.pop(place, 0)
        if self.account:
            self.account.ended(self.llm.name, why, len(self.requests[place].prompt_ids), metrics, tokens)

    def __enter__(self) -> "Answers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for place in list(self.streams):
            self.end(place, CANCELLED)


def weight(said: Said) -> int:
    """About how much memory it takes, in log probabilities; those of the prompt come once and are not counted."""
    if not isinstance(said, GenerationEvent):
        return 0
    told = said.step.candidates if said.step else ()
    return PIECE + sum(len(entry.top) for entry in said.logprobs) + sum(map(len, told))
