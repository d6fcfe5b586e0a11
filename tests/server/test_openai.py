"""OpenAI's own client against the real server, compared with the model itself."""

import asyncio
from typing import Any

import openai
import pytest

from localllm import LLM, SamplingParams
from localllm.server.logs import IGNORED_HEADER

GREEDY = SamplingParams(temperature=0, max_tokens=24)
STORY = "Once upon a time, there was a little girl named"
THINGS = [
    "cats",
    "dogs",
    "rain",
    "snow",
    "bread",
    "trees",
    "moons",
    "music",
    "books",
    "trains",
    "birds",
    "kings",
    "shoes",
    "soup",
    "sand",
    "gold",
]
MESSAGES: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cat?"}]


@pytest.fixture
def client(demo_url):
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def stories_client(stories_url):
    with openai.OpenAI(base_url=f"{stories_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_as_the_model_answers_it(client: openai.OpenAI, demo: LLM) -> None:
    expected = demo.chat(MESSAGES, GREEDY)
    done = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=24)
    assert done.choices[0].message.content == expected.text != ""
    assert done.choices[0].finish_reason == expected.finish_reason
    assert done.usage
    assert done.usage.prompt_tokens == len(expected.prompt_ids)
    assert done.usage.completion_tokens == len(expected.token_ids)


def test_a_chat_is_streamed_as_it_is_answered(client: openai.OpenAI, demo: LLM) -> None:
    expected = demo.chat(MESSAGES, GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert sum(bool(delta.content) for delta in deltas) > 5, "it came in one piece"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == expected.finish_reason
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_same_seed_gives_the_same_text_streamed_or_not(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "temperature": 1.0,
        "top_p": 0.9,
        "max_tokens": 24,
    }
    whole = [client.chat.completions.create(seed=seed, **asked).choices[0].message.content for seed in (3, 4)]
    pieces = client.chat.completions.create(seed=3, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole[0] != whole[1]


def test_texts_are_continued_with_stop_strings_and_log_probabilities(
    stories_client: openai.OpenAI, stories: LLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=(" park",), logprobs=2)
    expected = stories.generate(STORY, params)
    done = stories_client.completions.create(
        model="stories260K", prompt=STORY, temperature=0, max_tokens=40, stop=" park", logprobs=2
    )
    choice = done.choices[0]
    assert choice.text == expected.text and choice.text.endswith("outside in the")
    assert choice.finish_reason == "stop"
    assert choice.logprobs
    assert choice.logprobs.token_logprobs == pytest.approx([p.logprob for p in expected.logprobs])


def test_several_texts_are_continued_side_by_side(stories_client: openai.OpenAI, stories: LLM) -> None:
    prompts = [STORY, "The big dog", "One day"]
    expected = [stories.generate(prompt, GREEDY).text for prompt in prompts]
    asked: dict[str, Any] = {"model": "stories260K", "prompt": prompts, "temperature": 0, "max_tokens": 24}
    done = stories_client.completions.create(**asked)
    assert [choice.text for choice in done.choices] == expected
    streamed = [""] * 3
    for chunk in stories_client.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_several_answers_to_one_prompt_follow_from_one_seed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "temperature": 20,
        "max_tokens": 16,
        "seed": 5,
    }
    one = client.chat.completions.create(**asked)
    done = client.chat.completions.create(n=3, **asked)
    texts = [choice.message.content for choice in done.choices]
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert texts[0] == one.choices[0].message.content and len(set(texts)) == 3
    streamed, usages = [""] * 3, []
    for chunk in client.chat.completions.create(n=3, stream=True, stream_options={"include_usage": True}, **asked):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert one.usage and done.usage and usages[0]
    assert done.usage.prompt_tokens == usages[0].prompt_tokens == one.usage.prompt_tokens
    assert done.usage.completion_tokens == usages[0].completion_tokens > one.usage.completion_tokens


def test_the_likeliest_of_best_of_are_returned(stories_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "stories260K", "prompt": [STORY, "One day"], "max_tokens": 12, "seed": 3}
    every = stories_client.completions.create(n=5, logprobs=0, **asked)
    best = stories_client.completions.create(n=2, best_of=5, **asked)

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = [
        choice.text
        for first in (0, 5)
        for choice in sorted(every.choices[first : first + 5], key=likelihood, reverse=True)[:2]
    ]
    assert [choice.text for choice in best.choices] == expected
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage == every.usage
    with pytest.raises(openai.BadRequestError) as error:
        stories_client.completions.create(best_of=5, stream=True, **asked)
    assert error.value.param == "best_of"


def test_likelihoods_of_texts_alone(stories_client: openai.OpenAI, stories: LLM) -> None:
    """The prompts are token ids, and no answer is generated."""
    prompts = [stories.tokenizer.encode(text) for text in (STORY, "One day")]
    asked: dict[str, Any] = {"model": "stories260K", "max_tokens": 0, "echo": True, "logprobs": 1}
    done = stories_client.completions.create(prompt=prompts, **asked)
    for choice, prompt in zip(done.choices, prompts, strict=True):
        told = choice.logprobs
        assert told and told.token_logprobs and told.tokens and told.top_logprobs
        assert len(told.token_logprobs) == len(told.tokens) == len(prompt)
        logprobs = stories.logits(prompt).log_softmax(-1)
        expected = [logprobs[place, token].item() for place, token in enumerate(prompt[1:])]
        assert told.token_logprobs[0] is None and told.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        pairs = list(zip(told.token_logprobs, told.top_logprobs, strict=True))[1:]
        assert all(value <= max(top.values()) for value, top in pairs)
    assert done.usage and done.usage.completion_tokens == 0
    text = stories_client.completions.create(prompt=STORY, **asked).choices[0]
    assert text.text == STORY and text.finish_reason == "length"


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    found = client.models.retrieve("demo")
    assert found in list(client.models.list())
    assert (found.id, found.model_extra) == ("demo", {"loaded": True, "context_length": 1024})
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.models.retrieve("gpt-5")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"extra_body": {"modalities": ["audio"]}}, "modalities"),
        ({"n": 1000}, "n"),
    ],
)
def test_an_invalid_field_is_named(client: openai.OpenAI, changes: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **changes})
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"


def test_an_answer_that_a_stop_string_cut_out_of_its_schema_is_an_error(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"const": "bc"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_format": form}
    whole, cut = (client.chat.completions.create(**asked, max_tokens=most) for most in (100, 2))
    assert whole.choices[0].finish_reason == "stop" and '"bc"' in (whole.choices[0].message.content or "")
    assert cut.choices[0].finish_reason == "length"
    with pytest.raises(openai.InternalServerError, match="the answer ends before its json_schema does"):
        client.chat.completions.create(**asked, max_tokens=100, stop=["b"])


def test_a_prompt_that_is_too_long_is_reported_with_both_numbers(stories_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512") as error:
        stories_client.completions.create(model="stories260K", prompt=[5] * 600, stream=True)
    assert error.value.code == "context_length_exceeded"


def test_end_tokens_are_ignored_on_request(stories_client: openai.OpenAI, stories: LLM) -> None:
    eos = next(iter(stories.eos_ids))
    asked: dict[str, Any] = {"model": "stories260K", "prompt": STORY, "temperature": 0, "max_tokens": 8}
    forced = asked | {"logit_bias": {str(eos): 1000}}
    assert stories_client.completions.create(**forced).usage.completion_tokens == 1  # type: ignore[union-attr]
    passed = stories_client.completions.create(**forced, extra_body={"ignore_eos": True})
    assert passed.usage and passed.usage.completion_tokens == 8


def test_min_tokens_delays_end_tokens_and_stop_strings(stories_client: openai.OpenAI, stories: LLM) -> None:
    eos = next(iter(stories.eos_ids))
    asked: dict[str, Any] = {"model": "stories260K", "prompt": STORY, "temperature": 0, "max_tokens": 40}
    forced = asked | {"logit_bias": {str(eos): 1000}, "extra_body": {"min_tokens": 8}}
    assert stories_client.completions.create(**forced).usage.completion_tokens == 9  # type: ignore[union-attr]
    free = stories_client.completions.create(**asked).choices[0].text
    stopped = stories_client.completions.create(**asked, stop=["a"], extra_body={"min_tokens": 8})
    text = stopped.choices[0].text
    assert "a" in text and free.startswith(text + "a") and stopped.choices[0].finish_reason == "stop"
    assert len(stories.tokenizer.encode(text, special=False)) >= 7
    raw = stories_client.completions.with_raw_response.create(**forced)
    assert IGNORED_HEADER not in raw.headers


def test_sixteen_concurrent_streams_match_single_ones(stories_url: str, stories: LLM) -> None:
    """Uses float32: with fewer bits, two tokens of nearly equal probability may swap."""
    prompts = [f"Once upon a time there were many {thing}" for thing in THINGS]
    lengths = [20 + 5 * place for place in range(len(prompts))]
    alone = [
        stories.generate(prompt, SamplingParams(temperature=0, max_tokens=length)).text
        for prompt, length in zip(prompts, lengths, strict=True)
    ]

    async def ask(client: openai.AsyncOpenAI, prompt: str, length: int) -> str:
        stream = await client.completions.create(
            model="stories260K", prompt=prompt, temperature=0, max_tokens=length, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stories_url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*map(ask, [client] * len(prompts), prompts, lengths))

    assert asyncio.run(ask_all()) == alone
    assert len(set(alone)) == len(THINGS)
