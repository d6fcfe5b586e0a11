"""Answers that are read on an event loop, several of one prompt among them."""

import asyncio

from localllm import LLM, SamplingParams
from localllm.api.asked import Asked
from localllm.request import GenerationEvent, Request
from localllm.server.answers import Answers

BLOCK = 16  # tokens


async def read(llm: LLM, requests: list[Request], each: int) -> list[list[GenerationEvent]]:
    said: list[list[GenerationEvent]] = [[] for _ in requests]
    with Answers(llm, requests, each) as answers:
        async for place, piece in answers:
            said[place].append(piece)
    return said


def test_a_prompt_is_computed_once_however_many_answers_it_has(stories: LLM) -> None:
    prompts = [[start, *range(10, 210)] for start in (1, 2)]
    asked = Asked("x", tuple(prompts), SamplingParams(max_tokens=8, seed=1), is_chat=False, n=4)
    said = asyncio.run(read(stories, asked.prepare(stories), 4))
    found = [pieces[-1].metrics.cached_tokens for pieces in said if pieces[-1].metrics]
    assert [found[0], found[4]] == [0, 0]
    assert all(tokens > 201 - 2 * BLOCK for place, tokens in enumerate(found) if place % 4)
    for place, pieces in enumerate(said):
        params = SamplingParams(max_tokens=8, seed=pieces[-1].seed)
        alone = stories.generate(prompts[place // 4], params)
        assert tuple(token for piece in pieces for token in piece.token_ids) == alone.token_ids


def test_who_leaves_cancels_also_what_has_not_begun(stories: LLM) -> None:
    asked = Asked("x", ("Once",), SamplingParams(max_tokens=400), is_chat=False, n=4)

    async def leave() -> None:
        with Answers(stories, asked.prepare(stories), 4) as answers:
            await anext(answers)

    asyncio.run(leave())
    engine = stories.worker.engine
    stories.worker.call(engine.pool.check)
    assert stories.worker.call(lambda: (engine.scheduler.running, list(engine.scheduler.waiting))) == ([], [])


def test_what_has_come_meanwhile_is_known(stories: LLM) -> None:
    """So that it can be sent together."""
    requests = Asked("x", ("Once",), SamplingParams(max_tokens=40), is_chat=False).prepare(stories)

    async def lag() -> list[bool]:
        more: list[bool] = []
        with Answers(stories, requests) as answers:
            async for _, piece in answers:
                more.append(answers.more)
                if len(more) == 1:
                    while stories.worker.call(lambda: stories.worker.engine.busy):
                        await asyncio.sleep(0.01)
                assert piece
        return more

    more = asyncio.run(lag())
    assert any(more[1:]) and not more[-1]
