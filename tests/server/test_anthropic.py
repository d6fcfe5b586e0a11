"""Anthropic's own client against the real server, compared with the model itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.request import ChatRequest
from tests.scripted import write_scripted
from tests.server.conftest import serving
from tests.server.test_tools import SCHEMAS, ignorant  # noqa: F401 - a fixture

if TYPE_CHECKING:  # where it is used it is imported, which takes a second
    import anthropic

SYSTEM = "Be short."
HELLO: list[Any] = [{"role": "user", "content": "What is a cat?"}]
CHAT = [{"role": "system", "content": SYSTEM}, *HELLO]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{# <tool_call> #}{% if tools or enable_thinking %}{% endif %}"
)
COLD = {"temperature": 0}
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
TOOLS: list[Any] = [{"name": name, "description": "d", "input_schema": schema} for name, schema in SCHEMAS.items()]


@contextmanager
def client_of(url: str) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(demo_url: str) -> "Iterator[anthropic.Anthropic]":
    with client_of(demo_url) as client:
        yield client


def greedy(**more: Any) -> dict[str, Any]:
    """Arguments of a greedy request; the current version of the client has no temperature."""
    return {"model": "demo", "messages": HELLO, "system": SYSTEM, "max_tokens": 24, "extra_body": COLD, **more}


def test_a_message_is_answered_as_the_model_answers_it(client: "anthropic.Anthropic", demo: LLM) -> None:
    expected = demo.chat(CHAT, SamplingParams(temperature=0, max_tokens=24))
    done = client.messages.create(**greedy(system=[{"type": "text", "text": SYSTEM}]))
    [block] = done.content
    assert block.type == "text" and block.text == expected.text != ""
    assert done.role == "assistant" and done.model == "demo" and done.id.startswith("msg_")
    assert done.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.finish_reason]
    counts = done.usage
    assert counts.input_tokens + (counts.cache_read_input_tokens or 0) == len(expected.prompt_ids)
    assert counts.output_tokens == len(expected.token_ids)
    assert done._request_id and done._request_id.startswith("req_")


def test_a_message_is_streamed_as_it_is_answered(client: "anthropic.Anthropic") -> None:
    whole = client.messages.create(**greedy())
    with client.messages.stream(**greedy()) as stream:
        texts = list(stream.text_stream)
        found = stream.get_final_message()
    assert len(texts) > 5
    assert "".join(texts) == found.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (found.stop_reason, found.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) == sum(
        (whole.usage.input_tokens, whole.usage.cache_read_input_tokens or 0)
    )


def test_events_come_in_their_order_and_under_their_names(demo_url: str) -> None:
    raw = {"model": "demo", "messages": HELLO, "max_tokens": 24, **COLD, "stream": True}
    with httpx.stream("POST", f"{demo_url}/v1/messages", json=raw) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [body["type"] for body in bodies] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert bodies[0]["message"]["content"] == [] and bodies[0]["message"]["stop_reason"] is None
    assert bodies[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_the_stop_sequence_is_reported(client: "anthropic.Anthropic") -> None:
    text = client.messages.create(**greedy()).content[0].text  # type: ignore[union-attr]
    word = text.split()[2]
    asked = greedy(stop_sequences=["never said", word])
    done = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for found in (done, streamed):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
        assert found.content[0].text == text.partition(word)[0]  # type: ignore[union-attr]


def test_a_later_turn_reports_cached_tokens(client: "anthropic.Anthropic") -> None:
    story = {"role": "user", "content": "Tell me of the moon and of the sun. " * 12}
    first, second = (client.messages.create(**greedy(messages=[story], max_tokens=1)).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 and first.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens and second.input_tokens < first.input_tokens / 2
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_tokens_are_counted_also_beyond_the_context(client: "anthropic.Anthropic", demo: LLM) -> None:
    import anthropic

    count = client.messages.count_tokens(model="demo", system=SYSTEM, messages=HELLO)
    assert count.input_tokens == len(demo.prepare(ChatRequest(CHAT)).prompt_ids)
    long: list[Any] = [{"role": "user", "content": "word " * 3000}]
    assert client.messages.count_tokens(model="demo", messages=long).input_tokens > demo.context
    with pytest.raises(anthropic.BadRequestError, match=str(demo.context)):
        client.messages.create(model="demo", messages=long, max_tokens=5)


def test_errors_have_the_form_of_this_api(client: "anthropic.Anthropic", demo_url: str) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**greedy(model="claude-opus-4"))
    body: Any = missing.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert body["request_id"] == missing.value.request_id != ""
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for fields, says in (
        ({"messages": [{"role": "user", "content": [image]}]}, "blocks of type image"),
        ({"tools": TOOLS}, "does not read tools"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=says) as refused:
            client.messages.create(**greedy(**fields))
        body = refused.value.body
        assert body["error"]["type"] == "invalid_request_error"
    answer = httpx.post(f"{demo_url}/v1/messages/batches", json={})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    script = ["<think>", "I wonder.", "</think>", "Let me see.", "<tool_call>\n", CALL, "\n</tool_call>"]
    folder = write_scripted(tmp_path_factory.mktemp("thinker") / "thinker", script, template=TEMPLATE)
    with localllm.load(folder, device="cpu") as llm:
        yield llm


def check_parts(content: Any) -> None:
    assert [block.type for block in content] == ["thinking", "text", "tool_use"]
    assert content[0].thinking == "I wonder." and content[1].text == "Let me see."
    assert content[2].name == "weather" and content[2].input == {"city": "Köln"}


def test_thoughts_text_and_calls_are_blocks_and_go_back_as_such(thinker: LLM) -> None:
    asked: dict[str, Any] = {"model": thinker.name, "max_tokens": 60, "messages": HELLO, "tools": TOOLS}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with serving(thinker) as url, client_of(url) as client:
        done = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_message()
        result: Any = {"type": "tool_result", "tool_use_id": done.content[-1].id, "content": "18 °C"}  # type: ignore[union-attr]
        turns: list[Any] = [*HELLO, {"role": "assistant", "content": done.content}]
        turns.append({"role": "user", "content": [result]})
        prompt = {name: value for name, value in asked.items() if name != "max_tokens"}
        count = client.messages.count_tokens(**{**prompt, "messages": turns})
        again = client.messages.create(**{**asked, "messages": turns})
    check_parts(done.content)
    check_parts(streamed.content)
    assert done.stop_reason == streamed.stop_reason == "tool_use"
    assert {"thinking", "text", "input_json"} < kinds
    said = (
        "<|im_start|>user\nWhat is a cat?<|im_end|>\n<|im_start|>assistant\n<think>I wonder.</think>Let me see."
        "weather<|im_end|>\n<|im_start|>tool\n18 °C<|im_end|>\n<|im_start|>assistant\n"
    )
    assert count.input_tokens == len(thinker.tokenizer.encode(said))
    assert again.content


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_news"}])
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_satisfy_their_schemas(ignorant: LLM, choice: Any, stream: bool) -> None:  # noqa: F811
    tools = [{**tool, "strict": True} for tool in TOOLS]
    choice = {**choice, "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"model": ignorant.name, "max_tokens": 600, "messages": HELLO, "tools": tools}
    with serving(ignorant) as url, client_of(url) as client:
        if stream:
            with client.messages.stream(**asked, tool_choice=choice) as events:
                done = events.get_final_message()
        else:
            done = client.messages.create(**asked, tool_choice=choice)
    if done.stop_reason == "max_tokens":
        pytest.fail("the answer did not end")
    [block] = done.content
    assert done.stop_reason == "tool_use" and block.type == "tool_use"
    assert block.name in ((choice["name"],) if "name" in choice else SCHEMAS)
    assert jsonschema.Draft202012Validator(SCHEMAS[block.name]).is_valid(block.input)
