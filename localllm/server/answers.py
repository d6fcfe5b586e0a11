"""Answers of the engine's thread, read on the event loop without a thread per reader.

The engine's thread passes each event to `LLM.submit`'s `deliver`, which wakes up the loop and puts it into the
reader's queue.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Protocol

from localllm.errors import ReaderTooSlow
from localllm.llm.llm import collect_completion
from localllm.metrics import Metrics
from localllm.request import Completion, GenerationEvent, Request
from localllm.server.request_stats import CANCELLED, FAILED, current_request_stats
from localllm.text.grammar.result import check_answer

Delivered = GenerationEvent | BaseException

MAX_UNREAD = 2**19  # unread events per reader, measured by `memory_weight`: about 60 MB
EVENT_WEIGHT = 8  # memory of an event, relative to one log probability


class ClosableStream(Protocol):
    def close(self) -> None: ...


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class RequestSubmitter(Protocol):
    """The part of an LLM that a reader needs."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> TokenDecoder: ...
    def submit(self, request: Request, deliver: Callable[[Delivered], object]) -> ClosableStream: ...


class AnswerReader(AsyncIterator[tuple[int, GenerationEvent]]):
    """Events of the answers to one or several requests, each with the index of its request.

    The last event of an answer has a finish_reason. An error of any answer is raised. How each answer ended is
    recorded in the statistics of the HTTP request. Leaving `with` cancels unfinished answers, whose blocks are
    free before the engine's next step; so does a reader that leaves too much unread.
    """

    def __init__(
        self,
        llm: RequestSubmitter,
        requests: Sequence[Request],
        answers_per_prompt: int = 1,
        max_unread: int = MAX_UNREAD,
    ):
        """Submit the requests. Must be called on the event loop.

        answers_per_prompt: number of consecutive requests that share a prompt. The first of them computes it; the
        others start when it is in the cache. Raises Busy if the queue is full, and LocalLLMError if the model was
        closed; then none of the requests runs.
        """
        self.llm = llm
        self.requests = requests
        self.answers_per_prompt = answers_per_prompt
        self.unread_weight, self.max_unread, self.overflowed = 0, max_unread, False
        self.request_stats = current_request_stats()
        self.token_counts: dict[int, int] = {}  # so far, of unfinished answers
        if self.request_stats and self.request_stats.log_prompts:
            self.request_stats.prompts += [
                llm.tokenizer.decode(request.prompt_ids) for request in requests[::answers_per_prompt]
            ]
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[tuple[int, Delivered]] = asyncio.Queue()
        self.streams: dict[int, ClosableStream] = {}  # of unfinished answers
        first_of_prompts = range(0, len(requests), answers_per_prompt)
        self.deferred = set(range(len(requests))) - set(first_of_prompts)
        with ExitStack() as undo:
            undo.push(self)
            for index in first_of_prompts:
                self.submit(index)
            undo.pop_all()

    def submit(self, index: int) -> None:
        self.streams[index] = self.llm.submit(self.requests[index], partial(self.deliver, index))

    def deliver(self, index: int, item: Delivered) -> None:
        """Hand an event over to the loop. Called on the engine's thread."""
        with suppress(RuntimeError):  # the loop, and with it the reader, has ended
            self.loop.call_soon_threadsafe(self.enqueue, index, item)

    def enqueue(self, index: int, item: Delivered) -> None:
        """Queue an event. If too much is unread, cancel all answers and queue ReaderTooSlow as the last item."""
        if self.overflowed:
            return
        self.unread_weight += memory_weight(item)
        self.overflowed = self.unread_weight > self.max_unread
        if self.overflowed:
            item = ReaderTooSlow("the client reads the answer too slowly", "read it faster")
            for stream in self.streams.values():
                stream.close()
        self.queue.put_nowait((index, item))

    async def __anext__(self) -> tuple[int, GenerationEvent]:
        if not self.streams:
            raise StopAsyncIteration
        index, item = await self.queue.get()
        self.unread_weight -= memory_weight(item)
        if isinstance(item, BaseException):
            self.finish(index, FAILED)
            raise item
        self.token_counts[index] = self.token_counts.get(index, 0) + len(item.token_ids)
        if item.finish_reason is not None:
            self.finish(index, item.finish_reason, item.metrics)
        if self.deferred and (item.token_ids or item.finish_reason is not None):
            for sibling in self.deferred.intersection(range(index, index + self.answers_per_prompt)):
                self.deferred.remove(sibling)
                self.submit(sibling)
        return index, item

    @property
    def has_more(self) -> bool:
        """Whether an event is queued already, so that output may be sent together with the next."""
        return not self.queue.empty()

    async def completions(
        self, on_event: Callable[[int, GenerationEvent], object] = lambda index, event: None
    ) -> list[Completion]:
        """Read all answers to the end, calling `on_event` for each event. Raises OutputInvalid for an answer that
        does not match its grammar, unless it was cut off."""
        events: list[list[GenerationEvent]] = [[] for _ in self.requests]
        async for index, event in self:
            events[index].append(event)
            on_event(index, event)
        completions = [collect_completion(*pair) for pair in zip(self.requests, events, strict=True)]
        for request, completion in zip(self.requests, completions, strict=True):
            await asyncio.to_thread(check_answer, request, completion, untrusted=True)
        return completions

    def finish(self, index: int, reason: str, metrics: Metrics | None = None) -> None:
        self.streams.pop(index).close()
        tokens = self.token_counts.pop(index, 0)
        if self.request_stats:
            self.request_stats.answer_ended(
                self.llm.name, reason, len(self.requests[index].prompt_ids), metrics, tokens
            )

    def __enter__(self) -> "AnswerReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for index in list(self.streams):
            self.finish(index, CANCELLED)


def memory_weight(item: Delivered) -> int:
    """Approximate memory in units of one log probability, without those of the prompt, which come once."""
    if not isinstance(item, GenerationEvent):
        return 0
    candidates = item.step.candidates if item.step else ()
    return EVENT_WEIGHT + sum(len(entry.top) for entry in item.logprobs) + sum(map(len, candidates))
