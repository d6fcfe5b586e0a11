"""OpenAI's client beyond the plain request: helpers, errors, headers, gaps."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

import localllm
from localllm import LLM, SamplingParams
from tests.scripted import write_scripted
from tests.server.conftest import serving

MESSAGES: list[Any] = [{"role": "user", "content": "What is a cat?"}]
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
LONG = [{"role": "user", "content": "x " * 9000}]
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


class Cat(pydantic.BaseModel):
    says: Literal["meow", "purr"]
    hungry: bool


@pytest.fixture
def client(demo_url: str):
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def asynchronous(demo_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)


def test_the_asynchronous_client_matches_the_synchronous_one(
    client: openai.OpenAI, asynchronous: openai.AsyncOpenAI
) -> None:
    expected = client.chat.completions.create(**ASKED).choices[0].message.content

    async def ask() -> tuple[str | None, str]:
        async with asynchronous:
            whole = await asynchronous.chat.completions.create(**ASKED)
            stream = await asynchronous.chat.completions.create(stream=True, **ASKED)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return whole.choices[0].message.content, text

    assert asyncio.run(ask()) == (expected, expected)


def test_answers_are_parsed_by_a_model_of_pydantic(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_format": Cat, "max_tokens": 100}
    done = client.chat.completions.parse(**asked)
    assert isinstance(done.choices[0].message.parsed, Cat)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Cat)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked | {"max_tokens": 3})


def test_log_probabilities_match_their_tokens(client: openai.OpenAI, demo: LLM) -> None:
    expected = demo.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12, logprobs=3))
    done = client.chat.completions.create(logprobs=True, top_logprobs=3, **ASKED)
    told = done.choices[0].logprobs
    assert told and told.content
    assert [entry.logprob for entry in told.content] == pytest.approx([e.logprob for e in expected.logprobs])
    assert "".join(entry.token for entry in told.content) == expected.text
    assert all(len(entry.top_logprobs) == 3 for entry in told.content)


def test_parts_developers_and_names_are_read_as_plain_messages_are(client: openai.OpenAI) -> None:
    def ask(*messages: Any) -> tuple[str | None, int]:
        done = client.chat.completions.create(**ASKED | {"messages": messages})
        assert done.usage
        return done.choices[0].message.content, done.usage.prompt_tokens

    plain = ask({"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cat?"})
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a cat?"}]
    assert ask({"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}) == plain
    assert ask({"role": "system", "content": "Be short."}, {"role": "user", "name": "ann", **MESSAGES[0]}) == plain


def test_cached_tokens_and_models_are_reported(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Tell me about cats and dogs, " * 12}]
    first, second = (client.chat.completions.create(**ASKED | {"messages": long}) for _ in range(2))
    for done in (first, second):
        assert done.usage and done.usage.prompt_tokens_details and done.usage.completion_tokens_details
        assert done.usage.completion_tokens_details.reasoning_tokens == 0
    assert second.usage and second.usage.prompt_tokens_details and second.usage.prompt_tokens_details.cached_tokens
    assert 0.8 < second.usage.prompt_tokens_details.cached_tokens / second.usage.prompt_tokens < 1
    assert first.system_fingerprint == second.system_fingerprint != None  # noqa: E711
    assert first.id != second.id


def test_raw_answers_have_their_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].finish_reason == "length"
    with client.chat.completions.with_streaming_response.create(stream=True, **ASKED) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["cache-control"] == "no-cache"
        assert list(streamed.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("changes", "kind", "status", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, 404, "model_not_found"),
        ({"model": "../../etc/passwd"}, openai.NotFoundError, 404, "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, 400, None),
        ({"messages": LONG}, openai.BadRequestError, 400, "context_length_exceeded"),
    ],
)
def test_errors_are_those_that_the_client_knows(
    client: openai.OpenAI, changes: Any, kind: type[openai.APIStatusError], status: int, code: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as error:
            client.chat.completions.create(stream=stream, **ASKED | changes)
        assert (error.value.status_code, error.value.code) == (status, code)
        assert isinstance(error.value.body, dict) and error.value.message


def test_a_route_that_does_not_exist_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"there is no route .*; GET /openapi\.json lists all routes"):
        client.images.generate(prompt="a cat")
    with pytest.raises(openai.APIStatusError) as error:
        client.get("/chat/completions", cast_to=object)
    assert error.value.status_code == 405


def test_a_gap_is_filled_up_to_its_end(tmp_path: Path) -> None:
    script = ("return", " x", "<|fim_pad|>", "more")
    folder = write_scripted(tmp_path / "coder", script, before="<|fim_middle|>", special=MARKS)
    with (
        localllm.load(folder) as llm,
        serving(llm) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        done = client.completions.create(model="coder", prompt="def f(x): ", suffix="\n\nf(1)", max_tokens=20)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("return x", "stop")
    assert done.usage and done.usage.prompt_tokens == len("def f(x): \n\nf(1)") + 3


def test_a_gap_is_for_models_that_fill_gaps(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support infilling"):
        client.completions.create(model="demo", prompt="def f(", suffix="return x", max_tokens=4)
