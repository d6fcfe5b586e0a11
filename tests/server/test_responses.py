"""`/v1/responses` through OpenAI's own client: complete, streamed, parsed and sent back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.server.responses import ResponseStore
from tests.scripted import write_scripted
from tests.server.conftest import serving

THINKING = ("<think>", "hm", " so", "</think>", "Yes", ",", " it", " is")
CALLING = ("I", " call", "<tool_call>", '{"name":', '"f","arguments":', '{"a": 1}', "}", "</tool_call>")
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def client_of(llm: LLM) -> Iterator[openai.OpenAI]:
    with serving(llm) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(demo: LLM) -> Iterator[openai.OpenAI]:
    yield from client_of(demo)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    yield from scripted(tmp_path_factory.mktemp("thinker") / "thinker", THINKING)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    yield from scripted(tmp_path_factory.mktemp("caller") / "caller", CALLING)


def scripted(folder: Path, script: tuple[str, ...]) -> Iterator[openai.OpenAI]:
    with localllm.load(write_scripted(folder, script)) as llm:
        yield from client_of(llm)


def test_an_input_is_answered_as_the_chat_is(client: openai.OpenAI, demo: LLM) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cat?"}]
    expected = demo.chat(messages, SamplingParams(temperature=0, max_tokens=200))
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 200}
    done = client.responses.create(instructions="Be short.", input="What is a cat?", **asked)
    assert done.output_text == expected.text
    assert (done.status, done.error, done.incomplete_details) == ("completed", None, None)
    assert done.usage
    assert done.usage.input_tokens == len(expected.prompt_ids)
    assert done.usage.output_tokens == len(expected.token_ids)
    parts = [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "a cat?"}]
    items: Any = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}]
    assert client.responses.create(input=items, **asked).output_text == expected.text


def test_a_stream_matches_the_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "What is a cat?", "temperature": 0, "max_output_tokens": 9}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 12
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    )
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.incomplete_details and last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.usage and whole.usage
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 9


def test_thoughts_are_an_item_of_their_own_and_can_be_sent_back(thinker: openai.OpenAI) -> None:
    done = thinker.responses.create(model="thinker", input="Well?")
    thoughts, message = done.output
    assert thoughts.type == "reasoning" and thoughts.content and thoughts.content[0].text == "hm so"
    assert message.type == "message" and done.output_text == "Yes, it is"
    assert done.usage and done.usage.output_tokens_details.reasoning_tokens == 3
    back: Any = [{"role": "user", "content": "Well?"}, *(item.model_dump() for item in done.output)]
    again = thinker.responses.create(model="thinker", input=[*back, {"role": "user", "content": "Sure?"}])
    assert again.output_text == "Yes, it is"
    with thinker.responses.stream(model="thinker", input="Well?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.reasoning_text.delta") == 2
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert final.output_text == done.output_text and len(final.output) == 2


def test_a_function_is_called_and_its_answer_sent_back(caller: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "caller", "tools": [TOOL], "extra_body": {"seed": 1}}
    done = caller.responses.create(input="Well?", **asked)
    message, call = done.output
    assert message.type == "message" and done.output_text == "I call"
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    events = list(caller.responses.create(input="Well?", stream=True, **asked))
    streamed = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in streamed] == [call.arguments]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[1].call_id == call.call_id  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    back: Any = [{"role": "user", "content": "Well?"}, *(item.model_dump() for item in done.output), result]
    assert caller.responses.create(input=back, **asked).output_text == "I call"


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI) -> None:
    class Cat(pydantic.BaseModel):
        says: Literal["meow", "purr"]
        legs: bool

    done = client.responses.parse(model="demo", input="A cat as JSON.", text_format=Cat, max_output_tokens=200)
    assert isinstance(done.output_parsed, Cat)
    assert done.text and done.text.format and done.text.format.type == "json_schema"


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "Hello", "max_output_tokens": 6, "temperature": 0}
    done = client.responses.create(top_logprobs=2, include=["message.output_text.logprobs"], **asked)
    [message] = done.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text" and part.logprobs
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"reasoning": {"summary": "none"}}, "reasoning.summary"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_rejected_by_name(client: openai.OpenAI, changes: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{"model": "demo", "input": "x", **changes})
    assert error.value.param == param


def test_a_response_continues_a_stored_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 40}

    def counted(**fields: Any) -> int:
        """Number of tokens of the conversation."""
        usage = client.responses.create(**asked, **fields).usage
        assert usage
        return usage.input_tokens

    first = client.responses.create(input="What is a cat?", instructions="Be short.", **asked)
    second = client.responses.create(input="And a dog?", previous_response_id=first.id, **asked)
    assert (first.store, second.previous_response_id) == (True, first.id)
    said = [item.model_dump() for item in first.output]
    both: Any = [{"role": "user", "content": "What is a cat?"}, *said, {"role": "user", "content": "And a dog?"}]
    assert second.usage and counted(input=both) == second.usage.input_tokens
    reference: Any = [both[0], {"type": "item_reference", "id": first.output[0].id}, both[-1]]
    assert counted(input=reference) == second.usage.input_tokens
    with client.responses.stream(input="Why?", previous_response_id=second.id, **asked) as events:
        third = events.get_final_response()
    assert client.responses.retrieve(third.id).output_text == third.output_text
    told = [item.type for item in client.responses.input_items.list(third.id)]
    assert told == ["message"] * 5
    client.responses.delete(first.id)
    for unknown in (first.id, client.responses.create(input="x", store=False, **asked).id):
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            client.responses.create(input="x", previous_response_id=unknown, **asked)


def test_stored_responses_are_bounded() -> None:
    kept = ResponseStore(max_responses=3, max_bytes=1000)
    for number in range(5):
        kept.add([{"content": "x"}], {"id": f"resp_{number}", "output": []})
    assert list(kept.by_id) == ["resp_2", "resp_3", "resp_4"]
    kept.get("resp_2")
    kept.add([{"content": "x" * 890}], {"id": "resp_5", "output": []})
    assert list(kept.by_id) == ["resp_2", "resp_5"] and kept.bytes <= 1000
    kept.add([{"content": "x" * 2000}], {"id": "resp_6", "output": []})
    assert list(kept.by_id) == ["resp_6"]


@pytest.mark.parametrize(
    ("tool", "script", "expected", "back"),
    [
        (
            {"type": "custom", "name": "f", "format": {"type": "grammar", "definition": "start: A"}},
            '{"input": "*** Begin"}',
            {"type": "custom_tool_call", "name": "f", "input": "*** Begin"},
            "custom_tool_call_output",
        ),
        (
            {"type": "local_shell"},
            '{"command": ["ls", "-l"]}',
            {"type": "local_shell_call"},
            "local_shell_call_output",
        ),
        (
            {"type": "namespace", "name": "mcp__fs__", "tools": [{"type": "function", "name": "read"}]},
            '{"a": 1}',
            {"type": "function_call", "name": "read", "namespace": "mcp__fs__", "arguments": '{"a": 1}'},
            "function_call_output",
        ),
    ],
)  # fmt: skip
def test_custom_tools_are_called_by_their_type(
    tmp_path: Path, tool: Any, script: str, expected: dict[str, Any], back: str
) -> None:
    name = {"custom": "f", "local_shell": "local_shell", "namespace": "mcp__fs__read"}[tool["type"]]
    call = ("<tool_call>", f'{{"name":"{name}","arguments":', script, "}", "</tool_call>")
    for client in scripted(tmp_path / "caller", call):
        asked: dict[str, Any] = {"model": "caller", "temperature": 0, "max_output_tokens": len(call) + 1}
        events = list(client.responses.create(input="Well?", tools=[tool], stream=True, **asked))
        assert events[-1].type == "response.completed"
        [item] = events[-1].response.output
        assert item.model_dump(exclude_none=True).items() >= expected.items()
        if item.type == "local_shell_call":
            assert item.action.command == ["ls", "-l"]
        result = {"type": back, "call_id": item.call_id, "output": "done"}
        history: Any = [{"role": "user", "content": "Well?"}, item.model_dump(exclude_none=True), result]
        assert client.responses.create(input=history, tools=[tool], **asked).output


def test_an_interrupted_stream_ends_with_an_error(demo: LLM) -> None:
    """Closes the model during the stream."""
    with localllm.load("demo") as own:
        for client in client_of(own):
            events = client.responses.create(
                model="demo", input="Tell a story", stream=True, extra_body={"seed": 1}
            )
            seen = []
            for event in events:
                seen.append(event)
                if len(seen) == 6:
                    own.close()
    assert [event.type for event in seen[-2:]] == ["error", "response.failed"]
    last = seen[-1]
    assert last.type == "response.failed" and last.response.error and "closed" in last.response.error.message
