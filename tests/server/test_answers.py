"""Answers read on an event loop, including several to one prompt."""

import asyncio

import pytest

from localllm import LLM, SamplingParams
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import ReaderTooSlow
from localllm.request import ChatRequest, GenerationEvent, Request
from localllm.server.answers import EVENT_WEIGHT, AnswerReader

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
