"""Requests of Anthropic's Messages API: translation and rejected fields."""

import json
from typing import Any

import pytest

from localllm.api.anthropic.requests import parse_count_request, parse_message_request
from localllm.errors import BadField, UsageError
from localllm.request import SamplingParams, ToolUse

DEFAULTS = SamplingParams(temperature=0.7, top_k=20)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"ä": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18 °C"}]}


def asked(**fields: Any) -> Any:
    return parse_message_request({"model": "m", "max_tokens": 9, "messages": HELLO, **fields}, DEFAULTS)


def read(*messages: dict[str, Any], **fields: Any) -> Any:
    [prompt] = asked(messages=list(messages), **fields).prompts
    return prompt


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_sampling_comes_from_the_body_or_the_model() -> None:
    params = asked(temperature=0.5, top_p=0.9, stop_sequences=["a", "b"]).params
    assert params == SamplingParams(temperature=0.5, top_p=0.9, top_k=20, stop=("a", "b"), max_tokens=9)
    assert asked(metadata={"user_id": "x"}, service_tier="auto", cache_control={"type": "ephemeral"}) == asked()


def test_texts_are_joined_by_an_empty_line() -> None:
    system = [text("Be kind.", cache_control={"type": "ephemeral"}), text("Be short.")]
    one = {"role": "system", "content": "Be kind.\n\nBe short."}
    assert read(*HELLO, system=system) == [one, *HELLO]
    assert read(*HELLO, system="Be kind.\n\nBe short.") == [one, *HELLO]
    assert read(said("user", text("a"), text("b")), {"role": "user", "content": "c"}) == [
        {"role": "user", "content": "a\n\nb\n\nc"}
    ]


def test_calls_results_and_thoughts_come_back_as_templates_want_them() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    failed = {**RESULT, "content": "no such city", "is_error": True}
    messages = read(*HELLO, said("assistant", thought, text("I look."), CALL), said("user", RESULT, text("And?")))
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"ä": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "18 °C"},
        {"role": "user", "content": "And?"},
    ]
    messages = read(*HELLO, said("assistant", CALL), said("user", failed), said("user", RESULT))
    assert [message["content"] for message in messages] == ["Hello", None, "Error: no such city", "18 °C"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], "messages.0"),
        ([{"role": "king", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([said("user", "x")], "messages.0.content.0"),
        ([said("user", {"type": "image", "source": {}})], "messages.0.content.0.type"),
        ([said("user", CALL)], "messages.0.content.0.type"),
        ([said("user", RESULT)], "messages.0.content.0.tool_use_id"),
        ([said("user", text("x", wings=2))], "messages.0.content.0.wings"),
        ([*HELLO, said("assistant", CALL), said("user", {**RESULT, "content": [{"type": "image"}]})],
         "messages.2.content.0.content.0.type"),
        ([*HELLO, {"role": "system", "content": "Be short."}], "messages.1"),
    ],
)  # fmt: skip
def test_an_invalid_message_is_reported_with_its_position(messages: Any, param: str) -> None:
    with pytest.raises(BadField) as caught:
        asked(messages=messages)
    assert caught.value.param == param


def test_the_answer_continues_the_last_assistant_message() -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    assert asked(messages=[*HELLO, begun]).prompts == ([*HELLO, {**begun, "prefix": True}],)


def test_tool_choice() -> None:
    def use(**choice: Any) -> ToolUse:
        return asked(tools=[TOOL], tool_choice=choice).tool_use

    function = {"name": "f", "parameters": TOOL["input_schema"], "description": "d"}
    assert asked(tools=[TOOL]).tools == [{"type": "function", "function": function}]
    assert asked(tools=[TOOL]).tool_use == use(type="auto") == use(type="none") == ToolUse()
    assert asked(tools=[TOOL], tool_choice={"type": "none"}).tools is None
    assert use(type="any") == ToolUse(required=True)
    assert use(type="tool", name="f", disable_parallel_tool_use=True) == ToolUse(name="f", parallel=False)
    assert use(type="auto", disable_parallel_tool_use=True) == ToolUse(parallel=False)
    assert asked(tools=[{**TOOL, "strict": True}]).tools[0]["function"]["strict"] is True


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": "9"}),
        ("wings", {"wings": 2}),
        ("tools", {"tools": {}}),
        ("tools", {"tools": ["f"]}),
        ("tools", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}),
        ("thinking", {"thinking": {"type": "sometimes"}}),
    ],
)
def test_an_invalid_field_is_rejected_by_name(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadField) as caught:
        asked(**fields)
    assert str(caught.value.param).split(".")[0] == name


def test_values_beyond_their_range_are_refused() -> None:
    for fields in ({"temperature": 1e9}, {"top_p": 2.0}, {"stop_sequences": [""]}, {"max_tokens": -1}):
        with pytest.raises(UsageError):
            asked(**fields)


def test_thoughts_and_the_form_of_an_answer() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert asked(thinking=thinking).think is True
    assert asked(thinking={"type": "disabled"}).think is False
    assert asked().think is asked(thinking={"type": "adaptive"}).think is None
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    found = asked(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert json.loads(found.params.grammar.text) == schema
    assert found.template_arguments == {"reasoning_effort": "low"}


def test_counting_tokens_needs_no_limit() -> None:
    found = parse_count_request({"model": "m", "messages": HELLO, "tools": [TOOL]}, DEFAULTS)
    assert found.prompts == (HELLO,) and found.tools
    with pytest.raises(BadField, match="max_tokens is not a field"):
        parse_count_request({"model": "m", "messages": HELLO, "max_tokens": 5}, DEFAULTS)
