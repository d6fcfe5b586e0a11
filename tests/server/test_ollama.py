"""Ollama's own client against the real server, compared with the model itself."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import ollama
import pytest

from localllm import LLM, SamplingParams
from localllm.request import ChatRequest, Grammar, GrammarKind

GREEDY = SamplingParams(temperature=0, max_tokens=24)
OPTIONS = {"temperature": 0, "num_predict": 24}
STORY = "Once upon a time, there was a little girl named"
MESSAGES: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cat?"}]


@pytest.fixture
def client(demo_url: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=demo_url) as client:
        yield client


@pytest.fixture
def stories_client(stories_url: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=stories_url) as client:
        yield client


def test_a_chat_is_answered_as_the_model_answers_it(client: ollama.Client, demo: LLM) -> None:
    expected = demo.chat(MESSAGES, GREEDY)
    done = client.chat("demo", MESSAGES, options=OPTIONS)
    assert done.message.content == expected.text != ""
    assert done.message.role == "assistant" and done.done and done.model == "demo"
    assert done.done_reason == expected.finish_reason
    assert done.prompt_eval_count == len(expected.prompt_ids)
    assert done.eval_count == len(expected.token_ids)
    assert done.total_duration and done.eval_duration and done.total_duration > done.eval_duration > 0
    assert done.prompt_eval_duration and done.load_duration is not None


def test_a_chat_is_streamed_as_it_is_answered(client: ollama.Client, demo: LLM) -> None:
    expected = demo.chat(MESSAGES, GREEDY)
    chunks = list(client.chat("demo", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == expected.text
    assert len(chunks) > 5, "it came in one piece"
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == len(expected.token_ids)


def test_several_ask_at_once(demo_url: str, demo: LLM) -> None:
    questions = [f"Tell me of {thing}." for thing in ("cats", "dogs", "rain", "bread")]

    async def ask(client: ollama.AsyncClient, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        stream = await client.chat("demo", messages, options=OPTIONS, stream=True)
        return "".join([chunk.message.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with ollama.AsyncClient(host=demo_url) as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    for question, said in zip(questions, asyncio.run(ask_all()), strict=True):
        assert said == demo.chat([{"role": "user", "content": question}], GREEDY).text


def test_raw_continuation_reports_its_tokens(stories_client: ollama.Client, stories: LLM) -> None:
    expected = stories.generate(STORY, GREEDY)
    done = stories_client.generate("stories260K", STORY, raw=True, options=OPTIONS)
    assert done.response == expected.text != ""
    assert done.context is None
    assert stories_client.generate("stories260K", STORY, options=OPTIONS).context == [
        *expected.prompt_ids,
        *expected.token_ids,
    ]


def test_a_prompt_uses_the_template_and_its_context_continues(client: ollama.Client, demo: LLM) -> None:
    first = client.generate("demo", "Hello", system="Be kind.", options=OPTIONS)
    asked: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    expected = demo.chat(asked, GREEDY)
    assert first.response == expected.text
    second = client.generate("demo", "And you?", context=first.context, options=OPTIONS)
    turn = demo.prepare(ChatRequest([{"role": "user", "content": "And you?"}])).prompt_ids
    begin = demo.tokenizer.encode("")
    turn = turn[1:] if begin and turn[0] == begin[0] else turn
    whole = demo.generate([*expected.prompt_ids, *expected.token_ids, *turn], GREEDY)
    assert second.response == whole.text
    assert second.context == [*whole.prompt_ids, *whole.token_ids]


def test_a_template_of_the_request_replaces_the_models(client: ollama.Client, demo: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    done = client.generate("demo", "Once upon a time", template=template, options=OPTIONS)
    assert done.response == demo.generate(demo.tokenizer.encode("Once upon a time", special=False), GREEDY).text
    with pytest.raises(ollama.ResponseError, match="in Go's syntax"):
        client.generate("demo", "Once", template="{{ .System }} {{ .Prompt }}")


def test_answers_follow_json_mode_and_schemas(client: ollama.Client, demo: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    done = client.chat("demo", MESSAGES, format=schema, options={"temperature": 0})
    assert json.loads(done.message.content or "")["n"] in (1, 2)
    asked = SamplingParams(temperature=0, max_tokens=200, grammar=Grammar(GrammarKind.JSON))
    done = client.chat("demo", MESSAGES, format="json", options={"temperature": 0, "num_predict": 200})
    assert done.message.content == demo.chat(MESSAGES, asked).text


def test_log_probabilities_are_those_of_the_model(client: ollama.Client, demo: LLM) -> None:
    expected = demo.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=5, logprobs=3))
    for stream in (True, False):
        made = client.chat(
            "demo", MESSAGES, logprobs=True, top_logprobs=3, options={**OPTIONS, "num_predict": 5}, stream=stream
        )
        chunks = list(made) if stream else [made]
        told = [entry for chunk in chunks for entry in chunk.logprobs or ()]  # type: ignore[union-attr]
        assert [entry.logprob for entry in told] == [entry.logprob for entry in expected.logprobs]
        assert all(len(entry.top_logprobs or ()) == 3 for entry in told)


def test_the_same_seed_gives_the_same_text(client: ollama.Client) -> None:
    options = {"seed": 7, "num_predict": 24, "temperature": 1.0}
    said = {client.chat("demo", MESSAGES, options=options).message.content for _ in range(3)}
    assert len(said) == 1


def test_stop_strings_end_an_answer(client: ollama.Client, demo: LLM) -> None:
    whole = demo.chat(MESSAGES, GREEDY).text
    stop = whole.split()[2]
    done = client.chat("demo", MESSAGES, options={**OPTIONS, "stop": [stop]})
    assert done.message.content == whole[: whole.index(stop)] and done.done_reason == "stop"


def test_length_is_the_done_reason(client: ollama.Client) -> None:
    assert client.chat("demo", MESSAGES, options={"num_predict": 2}).done_reason == "length"
    assert client.generate("demo", "Hi", options={"num_predict": 2}).done_reason == "length"


def test_empty_requests_load_and_unload(client: ollama.Client) -> None:
    assert client.generate("demo").done_reason == "load"
    assert client.chat("demo", []).done_reason == "load"
    assert client.generate("demo", "", keep_alive="5m").response == ""


def test_num_ctx_is_an_enforced_limit(client: ollama.Client, demo: LLM) -> None:
    long = [{"role": "user", "content": "word " * 60}]
    count = len(demo.prepare(ChatRequest(long)).prompt_ids)
    with pytest.raises(ollama.ResponseError, match=f"{count} tokens and the context holds 32") as error:
        client.chat("demo", long, options={"num_ctx": 32})
    assert error.value.status_code == 400
    done = client.chat("demo", MESSAGES, options={"num_ctx": 32, "temperature": 0})
    assert (done.prompt_eval_count or 0) + (done.eval_count or 0) <= 32


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_ctx": "many"}, 'option "num_ctx" must be of type integer'),
        ({"stop": "x"}, 'option "stop" must be of type array'),
        ({"top_p": 7}, "top_p is 7"),
    ],
)
def test_unsupported_options_are_named(client: ollama.Client, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ollama.ResponseError, match=told) as error:
        client.chat("demo", MESSAGES, options=options)
    assert error.value.status_code == 400


def test_options_that_change_no_answer_are_taken(client: ollama.Client, demo: LLM) -> None:
    options = {**OPTIONS, "num_gpu": 99, "use_mmap": True, "typical_p": 1.0, "mirostat": 0, "num_keep": 4}
    assert client.chat("demo", MESSAGES, options=options).message.content == demo.chat(MESSAGES, GREEDY).text


def test_missing_capabilities_have_ollamas_error(client: ollama.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        client.chat("demo", MESSAGES, tools=[tool])
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat("demo", MESSAGES, think=True)
    with pytest.raises(ollama.ResponseError, match="does not support insert"):
        client.generate("demo", "a", suffix="b")
    with pytest.raises(ollama.ResponseError, match="images"):
        client.generate("demo", "a", images=[b"\x89PNG"])
    assert client.chat("demo", MESSAGES, think=False, options=OPTIONS).message.content


def test_a_model_that_is_not_here_is_not_found(client: ollama.Client) -> None:
    for ask in (
        lambda: client.chat("nothing-like-it", MESSAGES),
        lambda: client.generate("nothing-like-it", keep_alive=0),
        lambda: client.show("nothing-like-it"),
        lambda: client.delete("nothing-like-it"),
        lambda: client.copy("nothing-like-it", "other"),
        lambda: client.show("/etc"),
    ):
        with pytest.raises(ollama.ResponseError, match="not found") as error:
            ask()
        assert error.value.status_code == 404


def test_models_are_listed_and_described(client: ollama.Client, demo: LLM) -> None:
    found = {model.model: model for model in client.list().models}["demo:latest"]
    assert found.digest and len(found.digest) == 64 and int(found.digest, 16)
    assert found.size and found.size > 5_000_000 and found.modified_at and found.modified_at.tzinfo
    assert found.details and found.details.format == "safetensors" and found.details.family == "llama"
    told = client.show("demo:latest")
    assert told.details == found.details
    assert told.capabilities == ["completion"]
    assert told.template and "<|begin|>" in told.template
    assert told.parameters and "temperature" in told.parameters
    assert told.modelinfo
    assert told.modelinfo["general.architecture"] == "llama"
    assert told.modelinfo["llama.context_length"] == demo.config.max_context
    assert told.modelinfo["llama.block_count"] == 6
    assert told.modelfile and "FROM demo" in told.modelfile and told.license == "apache-2.0"


def test_running_models_are_listed(client: ollama.Client, demo: LLM) -> None:
    [running] = client.ps().models
    assert running.model == "demo:latest" and running.digest
    assert running.size == demo.memory.total and running.size_vram == 0
    assert running.expires_at and running.context_length == demo.context


def test_any_keep_alive_is_accepted(demo_url: str) -> None:
    asked = {"model": "demo", "prompt": "Hi", "stream": False, "options": {"num_predict": 1}}
    for keep_alive in (10**400, 1e308, "999999999999h"):
        answer = httpx2.post(f"{demo_url}/api/generate", json=asked | {"keep_alive": keep_alive})
        assert answer.status_code == 200, answer.text
        assert httpx2.get(f"{demo_url}/api/ps").json()["models"][0]["expires_at"] > "2200"


@pytest.mark.parametrize("template", ["{{", "{% for i in range(10**9) %}x{% endfor %}", "{{ 1/0 }}"])
def test_a_template_that_is_sent_is_its_senders_fault(demo_url: str, template: str) -> None:
    answer = httpx2.post(f"{demo_url}/api/generate", json={"model": "demo", "prompt": "Hi", "template": template})
    assert answer.status_code == 400 and "template" in answer.json()["error"]
