"""Answers of the engine's thread, read on the event loop without a thread per reader.

After each step the engine's thread puts the events of all answers into the `Mailbox` of their loop and wakes the
loop once, which passes them to the readers.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Protocol

from localllm.errors import ReaderTooSlow
from localllm.llm.llm import collect_completion
from localllm.llm.worker import Deliver, Delivered
from localllm.metrics import Metrics
from localllm.request import Completion, GenerationEvent, Request
from localllm.server.request_stats import CANCELLED, FAILED, current_request_stats
from localllm.text.grammar.result import check_answer

MAX_UNREAD = 2**19  # unread events per reader, measured by `memory_weight`: about 60 MB
EVENT_WEIGHT = 8  # memory of an event, relative to one log probability
MAX_BATCH = 512  # events that are sent together

IndexedEvent = tuple[int, GenerationEvent]  # with the index of its request


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
    def submit(self, request: Request, deliver: Deliver, wake: Callable[[], object]) -> ClosableStream: ...


class Mailbox:
    """Events on their way from engines to the readers of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = weakref.ref(loop)  # which refers to its mailbox
        self.events: deque[tuple[Deliver, list[Delivered]]] = deque()
        self.is_waking = False  # the loop will call `empty`

    def put(self, enqueue: Deliver, events: list[Delivered]) -> None:
        """Add events; enqueue: called with them on the loop. May be called on any thread."""
        self.events.append((enqueue, events))

    def wake(self) -> None:
        """Have the loop empty the mailbox. May be called on any thread."""
        if self.is_waking or not self.events:
            return
        self.is_waking = True
        with suppress(RuntimeError):
            if loop := self.loop():
                loop.call_soon_threadsafe(self.empty)
                return
        self.is_waking = False  # the loop, and with it all readers, has ended
        self.events.clear()

    def empty(self) -> None:
        """Pass the events to their readers."""
        self.is_waking = False  # first: whatever is put in from now on wakes the loop again
        for _ in range(len(self.events)):
            enqueue, events = self.events.popleft()
            enqueue(events)


MAILBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


class AnswerReader(AsyncIterator[IndexedEvent]):
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
        self.mailbox = MAILBOXES.get(self.loop) or MAILBOXES.setdefault(self.loop, Mailbox(self.loop))
        self.unread: deque[tuple[int, Delivered]] = deque()
        self.waiter: asyncio.Future[None] | None = None  # done when something is unread
        self.error: Exception | None = None  # raised by the next call of `next_events`
        self.streams: dict[int, ClosableStream] = {}  # of unfinished answers
        first_of_prompts = range(0, len(requests), answers_per_prompt)
        self.deferred = set(range(len(requests))) - set(first_of_prompts)
        with ExitStack() as undo:
            undo.push(self)
            for index in first_of_prompts:
                self.submit(index)
            undo.pop_all()

    def submit(self, index: int) -> None:
        deliver = partial(self.mailbox.put, partial(self.enqueue, index))
        self.streams[index] = self.llm.submit(self.requests[index], deliver, self.mailbox.wake)

    def enqueue(self, index: int, events: list[Delivered]) -> None:
        """Queue the events of a step. If too much is unread, cancel all answers and queue ReaderTooSlow as the
        last item."""
        for item in events:
            if self.overflowed:
                return
            self.unread_weight += memory_weight(item)
            self.overflowed = self.unread_weight > self.max_unread
            if self.overflowed:
                item = ReaderTooSlow("the client reads the answer too slowly", "read it faster")
                for stream in self.streams.values():
                    stream.close()
            self.unread.append((index, item))
        if self.waiter and not self.waiter.done():
            self.waiter.set_result(None)

    async def __anext__(self) -> IndexedEvent:
        if not self.streams:
            raise StopAsyncIteration
        await self.wait()
        return self.take()

    async def next_events(self) -> list[IndexedEvent]:
        """Wait for the next events, and return those that are there, so that they are sent together; empty at the
        end. Raises the errors of iterating, after the events before an error."""
        if self.error:
            raise self.error
        if self.streams:
            await self.wait()
        events: list[IndexedEvent] = []
        try:
            while self.unread and self.streams and len(events) < MAX_BATCH:
                events.append(self.take())
        except Exception as error:
            if not events:
                raise
            self.error = error
        return events

    async def wait(self) -> None:
        """Return when something is unread."""
        while not self.unread:
            self.waiter = self.loop.create_future()
            await self.waiter

    def take(self) -> IndexedEvent:
        """Return the next unread event, or raise the error in its place."""
        index, item = self.unread.popleft()
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
        return bool(self.unread)

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
    if not item.logprobs and item.step is None:
        return EVENT_WEIGHT
    candidates = item.step.candidates if item.step else ()
    return EVENT_WEIGHT + sum(len(entry.top) for entry in item.logprobs) + sum(map(len, candidates))
