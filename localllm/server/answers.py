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

from localllm.errors import ReaderTooSlow
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, Request
from localllm.server.request_stats import CANCELLED, FAILED, current_request_stats

Delivered = GenerationEvent | BaseException

MAX_UNREAD = 2**19  # what may wait for one reader, as `weight` has it: some 60 MB
EVENT_WEIGHT = 8  # how much more memory a piece takes than one log probability


class ClosableStream(Protocol):
    def close(self) -> None: ...


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class RequestSubmitter(Protocol):
    """What is needed of an LLM."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> TokenDecoder: ...
    def submit(self, request: Request, deliver: Callable[[Delivered], object]) -> ClosableStream: ...


class AnswerReader(AsyncIterator[tuple[int, GenerationEvent]]):
    """The pieces of one answer or of several together, each with the place of its request; the last of each has
    the finish_reason. Raises what went wrong with any. How each ended goes into the account of the HTTP request.

    Leaving `with` cancels those that have not ended: their blocks are free before the engine's next step. So does
    leaving too much unread.
    """

    def __init__(
        self,
        llm: RequestSubmitter,
        requests: Sequence[Request],
        answers_per_prompt: int = 1,
        max_unread: int = MAX_UNREAD,
    ):
        """Begins to answer. On the event loop only. Raises Busy where too many wait, and LocalLLMError where the
        model was closed; then none of them goes on.

        answers_per_prompt: so many of the requests that follow each other have one prompt. It is computed for the
        first of them;
        the others begin once they find it in the cache.
        """
        self.unread_weight, self.max_unread, self.given_up = 0, max_unread, False
        self.llm = llm
        self.requests = requests
        self.answers_per_prompt = answers_per_prompt
        self.request_stats = current_request_stats()
        self.token_counts: dict[int, int] = {}  # so far, of those that have not ended
        if self.request_stats and self.request_stats.log_prompts:
            self.request_stats.prompts += [
                llm.tokenizer.decode(request.prompt_ids) for request in requests[::answers_per_prompt]
            ]
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[tuple[int, Delivered]] = asyncio.Queue()
        self.streams: dict[int, ClosableStream] = {}  # those that have not ended
        self.deferred = set(range(len(requests))) - set(range(0, len(requests), answers_per_prompt))
        with ExitStack() as undo:
            undo.push(self)
            for place in range(0, len(requests), answers_per_prompt):
                self.submit(place)
            undo.pop_all()

    def submit(self, index: int) -> None:
        self.streams[index] = self.llm.submit(self.requests[index], partial(self.deliver, index))

    def deliver(self, index: int, item: Delivered) -> None:
        """On the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended, and whoever read with it
            self.loop.call_soon_threadsafe(self.enqueue, index, item)

    def enqueue(self, index: int, item: Delivered) -> None:
        """For the reader, unless too much waits for him: then answering ends, and what waits is still told."""
        if self.given_up:
            return
        self.unread_weight += memory_weight(item)
        self.given_up = self.unread_weight > self.max_unread
        if self.given_up:
            item = ReaderTooSlow("nobody reads the answer as fast as it comes", "read it faster")
            for stream in self.streams.values():
                stream.close()
        self.queue.put_nowait((index, item))

    async def __anext__(self) -> tuple[int, GenerationEvent]:
        if not self.streams:
            raise StopAsyncIteration
        place, said = await self.queue.get()
        self.unread_weight -= memory_weight(said)
        if isinstance(said, BaseException):
            self.finish(place, FAILED)
            raise said
        self.token_counts[place] = self.token_counts.get(place, 0) + len(said.token_ids)
        if said.finish_reason is not None:
            self.finish(place, said.finish_reason, said.metrics)
        if self.deferred and (said.token_ids or said.finish_reason is not None):
            for waiting in self.deferred.intersection(range(place, place + self.answers_per_prompt)):
                self.deferred.remove(waiting)
                self.submit(waiting)
        return place, said

    @property
    def has_more(self) -> bool:
        """Is a piece there already? Then what is made of this one may wait, to be sent together with it."""
        return not self.queue.empty()

    def finish(self, index: int, why: str, metrics: Metrics | None = None) -> None:
        self.streams.pop(index).close()
        tokens = self.token_counts.pop(index, 0)
        if self.request_stats:
            self.request_stats.answer_ended(
                self.llm.name, why, len(self.requests[index].prompt_ids), metrics, tokens
            )

    def __enter__(self) -> "AnswerReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for place in list(self.streams):
            self.finish(place, CANCELLED)


def memory_weight(item: Delivered) -> int:
    """About how much memory it takes, in log probabilities; those of the prompt come once and are not counted."""
    if not isinstance(item, GenerationEvent):
        return 0
    told = item.step.candidates if item.step else ()
    return EVENT_WEIGHT + sum(len(entry.top) for entry in item.logprobs) + sum(map(len, told))
