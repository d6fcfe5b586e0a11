"""Answers read on an event loop, including several to one prompt."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from localllm import LLM, SamplingParams
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import Busy, ReaderTooSlow
from localllm.llm.worker import Deliver, Delivered
from localllm.request import ChatRequest, GenerationEvent, Request
from localllm.server.answers import EVENT_WEIGHT, MAX_BATCH, AnswerReader, Mailbox

BLOCK = 16  # tokens


async def read(llm: LLM, requests: list[Request], each: int) -> list[list[GenerationEvent]]:
    said: list[list[GenerationEvent]] = [[] for _ in requests]
    with AnswerReader(llm, requests, each) as answers:
        async for place, piece in answers:
            said[place].append(piece)
    return said


def test_a_prompt_is_computed_once_however_many_answers_it_has(stories: LLM) -> None:
    prompts = [[start, *range(10, 210)] for start in (1, 2)]
    asked = ParsedRequest("x", tuple(prompts), SamplingParams(max_tokens=8, seed=1), is_chat=False, n=4)
    said = asyncio.run(read(stories, asked.prepare(stories), 4))
    found = [pieces[-1].metrics.cached_tokens for pieces in said if pieces[-1].metrics]
    assert [found[0], found[4]] == [0, 0]
    assert all(tokens > 201 - 2 * BLOCK for place, tokens in enumerate(found) if place % 4)
    for place, pieces in enumerate(said):
        params = SamplingParams(max_tokens=8, seed=pieces[-1].seed)
        alone = stories.generate(prompts[place // 4], params)
        assert tuple(token for piece in pieces for token in piece.token_ids) == alone.token_ids


def test_leaving_cancels_queued_answers_too(stories: LLM) -> None:
    asked = ParsedRequest("x", ("Once",), SamplingParams(max_tokens=400), is_chat=False, n=4)

    async def leave() -> None:
        with AnswerReader(stories, asked.prepare(stories), 4) as answers:
            await anext(answers)

    asyncio.run(leave())
    engine = stories.worker.engine
    stories.worker.call(engine.pool.check_invariants)
    assert stories.worker.call(lambda: (engine.scheduler.running, list(engine.scheduler.waiting))) == ([], [])


def test_buffered_events_are_available_at_once(stories: LLM) -> None:
    """Then they can be sent together."""
    requests = ParsedRequest("x", ("Once",), SamplingParams(max_tokens=40), is_chat=False).prepare(stories)

    async def lag() -> list[bool]:
        more: list[bool] = []
        with AnswerReader(stories, requests) as answers:
            async for _, piece in answers:
                more.append(answers.has_more)
                if len(more) == 1:
                    while stories.worker.call(lambda: stories.worker.engine.has_unfinished_requests):
                        await asyncio.sleep(0.01)
                assert piece
        return more

    more = asyncio.run(lag())
    assert any(more[1:]) and not more[-1]


def test_an_unread_answer_ends_with_an_error(demo: LLM) -> None:
    """Earlier events are still delivered."""
    request = demo.prepare(ChatRequest("Once", SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)))

    async def read_late() -> int:
        told = 0
        with AnswerReader(demo, [request], max_unread=20 * EVENT_WEIGHT) as answers:
            while not answers.overflowed:
                await asyncio.sleep(0.01)
            with pytest.raises(ReaderTooSlow, match="reads the answer too slowly"):
                async for _ in answers:
                    told += 1
        return told

    assert asyncio.run(read_late()) == 20
    while demo.worker.outputs:
        demo.worker.call(lambda: None)


def test_all_answers_of_a_step_wake_the_loop_once(stories: LLM) -> None:
    prompts = tuple([start, *range(10, 20)] for start in range(1, 9))
    asked = ParsedRequest("x", prompts, SamplingParams(max_tokens=24, ignore_eos=True), is_chat=False)

    async def count() -> tuple[int, int]:
        wakes, loop = list[object](), asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call, **named: (wakes.append(call[0]), wake(*call, **named))[1]
        before = stories.stats().steps
        with AnswerReader(stories, asked.prepare(stories)) as answers:
            events = [event async for _, event in answers]
        assert sum(len(event.token_ids) for event in events) == 8 * 24
        return len(wakes), stories.worker.call(lambda: stories.worker.engine.steps) - before

    wakes, steps = asyncio.run(count())
    assert 0 < wakes <= steps < 8 * 24


def test_what_arrives_while_the_mailbox_is_emptied_wakes_the_loop_again() -> None:
    async def exchange() -> list[str]:
        mailbox, got, done = Mailbox(asyncio.get_running_loop()), list[str](), asyncio.Event()

        def last(events: list[Delivered]) -> None:
            got.append("second")
            done.set()

        def first(events: list[Delivered]) -> None:
            got.append("first")
            mailbox.put(last, [])
            mailbox.wake()

        mailbox.put(first, [])
        mailbox.wake()
        mailbox.wake()
        await asyncio.wait_for(done.wait(), 60)
        return got

    assert asyncio.run(exchange()) == ["first", "second"]


def test_a_mailbox_forgets_events_for_a_loop_that_has_ended() -> None:
    async def make() -> Mailbox:
        return Mailbox(asyncio.get_running_loop())

    mailbox = asyncio.run(make())
    mailbox.put(lambda events: None, [])
    mailbox.wake()
    assert not mailbox.events


class Fixed:
    """A model that delivers given events as soon as a request is submitted, and refuses further requests."""

    name = "fixed"
    tokenizer: Any = None

    def __init__(self, events: list[Delivered]):
        self.events: list[Delivered] | None = events

    def submit(self, request: Request, deliver: Deliver, wake: Callable[[], object]) -> "Fixed":
        if self.events is None:
            raise Busy("the queue is full")
        events, self.events = self.events, None
        deliver(events)
        wake()
        return self

    def close(self) -> None: ...


@pytest.mark.parametrize("answers_per_prompt", [1, 2])
def test_events_before_an_error_are_returned_before_it_is_raised(answers_per_prompt: int) -> None:
    """The error is that of an answer, or that of a second one, which cannot start."""
    events: list[Delivered] = [GenerationEvent(1, "a"), GenerationEvent(1, "b")]
    if answers_per_prompt == 1:
        events.append(Busy("broken"))
    else:
        events.append(GenerationEvent(1, "c", (3,)))
    request = Request((1,), SamplingParams(), 0.0)

    async def read() -> str:
        text = ""
        reader = AnswerReader(Fixed(events), [request] * answers_per_prompt, answers_per_prompt)
        with reader as answers, pytest.raises(Busy):
            while batch := await answers.next_events():
                text += "".join(event.text for _, event in batch)
        return text

    assert asyncio.run(read()) == "ab"


def test_events_that_wait_are_returned_together_up_to_a_limit() -> None:
    request = Request((1,), SamplingParams(), 0.0)
    events: list[Delivered] = [GenerationEvent(1, "a") for _ in range(MAX_BATCH + 5)]

    async def read() -> list[int]:
        with AnswerReader(Fixed(events), [request]) as answers:
            return [len(await answers.next_events()) for _ in range(2)]

    assert asyncio.run(read()) == [MAX_BATCH, 5]
