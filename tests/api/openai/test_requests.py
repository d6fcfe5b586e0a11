"""Requests of OpenAI's API: every field is translated, and unsupported fields are rejected by name."""

import json
from typing import Any

import pytest

from localllm.api.body import parse_json_object
from localllm.api.openai.bodies import FIXED_VALUES, NEUTRAL_FIELDS, UNSUPPORTED_FIELDS, WITHOUT_EFFECT
from localllm.api.openai.requests import parse_chat_request, parse_completion_request
from localllm.api.openai.responses_api.requests import parse_response_request
from localllm.errors import BadField, UsageError
from localllm.request import Grammar, GrammarKind, SamplingParams, ToolUse

OWN = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def chat(**fields: Any) -> Any:
    return parse_chat_request({"model": "demo", "messages": HELLO, **fields}, OWN)


def completion(**fields: Any) -> Any:
    return parse_completion_request({"model": "demo", "prompt": "Once", **fields}, OWN)


def test_omitted_fields_take_the_models_recommendations() -> None:
    assert chat().params == OWN
    assert chat().prompts == (HELLO,)
    assert completion().params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=16)


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": 5,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 4,
    }
    more = {"stop": "END", "stop_token_ids": [3], "logit_bias": {"42": -100, "7": 1.5}}
    wanted = SamplingParams(**fields, stop=("END",), stop_ids=(3,), logit_bias={42: -100, 7: 1.5})
    assert chat(**fields, **more).params == completion(**fields, **more).params == wanted
    assert chat(stop=["a", "b"]).params.stop == ("a", "b")


def test_a_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(BadField, match="min_tokens is 9 and max_tokens is 5") as caught:
        chat(min_tokens=9, max_tokens=5)
    assert caught.value.param == "min_tokens"


def test_both_names_of_the_token_limit_work() -> None:
    assert chat(max_completion_tokens=5).params.max_tokens == chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=0).params.max_tokens == 0
    with pytest.raises(BadField, match="max_tokens is 5 and max_completion_tokens is 6"):
        chat(max_tokens=5, max_completion_tokens=6)
    silent = parse_completion_request({"model": "demo", "prompt": "x"}, SamplingParams(max_tokens=3))
    assert silent.params.max_tokens == 3


def test_log_probabilities_of_both_kinds_of_body() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    with pytest.raises(BadField, match="needs logprobs"):
        chat(top_logprobs=3)
    assert completion(logprobs=2).params.prompt_logprobs is None
    echoed = completion(logprobs=2, echo=True, max_tokens=0)
    assert (echoed.params.logprobs, echoed.params.prompt_logprobs, echoed.echo) == (2, 2, True)


def test_messages_become_texts_with_roles_that_templates_know() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning": "hm"},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
            {"role": "assistant", "content": None},
        ]
    )
    assert asked.prompts[0] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "12", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "is not a non-empty list"),
        ("Hello", "messages", "is not a non-empty list"),
        ([{"role": "function", "content": "x"}], "messages.0.role", "role 'function'"),
        ([{"role": ["user"], "content": "x"}], "messages.0.role", "role"),
        ([*HELLO, {"role": "user", "content": 5}], "messages.1.content", "is not text"),
        ([{"role": "user"}], "messages.0.content", "is not text"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages.0.weight", "not a field"),
        ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id", "is missing"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0.type",
            "parts of type image_url are not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text", "is missing"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
            "messages.0.tool_calls.0.function.arguments",
            "is missing",
        ),
    ],
)
def test_an_invalid_message_is_reported_with_its_position(messages: Any, param: str, says: str) -> None:
    with pytest.raises(BadField, match=says) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_prompts_of_all_four_shapes() -> None:
    assert completion(prompt="x").prompts == ("x",)
    assert completion(prompt=["x", "y"]).prompts == ("x", "y")
    assert completion(prompt=[1, 2]).prompts == ([1, 2],)
    assert completion(prompt=[[1, 2], [3]]).prompts == ([1, 2], [3])
    for wrong in ([], [[]], ["x", 1], [True], {"text": "x"}, 5):
        with pytest.raises(BadField, match="prompt has the wrong type") as caught:
            completion(prompt=wrong)
        assert caught.value.param == "prompt"
    with pytest.raises(BadField, match="prompt has 129 entries; send at most 128"):
        completion(prompt=["x"] * 129)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, {"x": 1}) for name in UNSUPPORTED_FIELDS),
        *(("n", wrong) for wrong in (0, 129, True, "1")),
        ("top_logprobs", 21),
        ("modalities", ["text", "audio"]),
        ("verbosity", "low"),
        ("store", True),
        ("tool_choice", "required"),
        ("tool_choice", "perhaps"),
        ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("invented", 1),
    ],
)
def test_unsupported_fields_are_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadField, match=name) as caught:
        chat(**{name: value})
    assert caught.value.param == name


def test_fields_without_effect_are_accepted() -> None:
    plain = chat()
    assert chat(**FIXED_VALUES) == plain
    assert chat(**dict.fromkeys(NEUTRAL_FIELDS, "x"), **WITHOUT_EFFECT) == plain
    assert chat(max_tokens=-1, top_k=-1, seed=-1) == chat(top_k=0)
    assert chat(stream_options={"include_usage": True}, timings_per_token=True).timings_per_token is False
    assert chat(temperature=None, tools=None, response_format=None, anything=None) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_k", 1.5),
        ("seed", "1"),
        ("max_tokens", 4.0),
        ("stop", 5),
        ("stop", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", [1]),
        ("logprobs", 1),
        ("ignore_eos", 1),
        ("model", None),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(BadField) as caught:
        chat(**{name: value})
    assert caught.value.param is not None and caught.value.param.split(".")[0] == name


def test_values_beyond_their_range_are_refused() -> None:
    for fields in ({"temperature": 1e9}, {"seed": -2}, {"max_tokens": 10**30}, {"stop": ""}, {"top_p": 0}):
        with pytest.raises(UsageError, match=next(iter(fields)).split("_")[0]):
            chat(**fields)


def test_values_beyond_their_range_name_their_field_as_it_was_called() -> None:
    for name in ("temperature", "top_p", "max_tokens", "max_completion_tokens"):
        with pytest.raises(BadField) as caught:
            chat(**{name: -2})
        assert caught.value.param == name
    with pytest.raises(BadField) as caught:
        parse_response_request({"model": "demo", "input": "Hello", "max_output_tokens": -2}, OWN)
    assert caught.value.param == "max_output_tokens"


def test_a_misspelt_field_suggests_the_right_one() -> None:
    with pytest.raises(BadField, match=r"temprature is not a field of this request; did you mean temperature\?"):
        chat(temprature=1)
    with pytest.raises(BadField, match="wings is not a field of this request; leave it out"):
        chat(wings=2)


def test_tools_are_given_as_they_were_sent_and_none_calls_no_tool() -> None:
    assert chat(tools=[TOOL], tool_choice="auto").tools == [TOOL]
    assert chat(tools=[TOOL]).tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    with pytest.raises(BadField, match="tools of type custom"):
        chat(tools=[{"type": "custom", "custom": {"name": "f"}}])
    with pytest.raises(BadField, match="needs tools"):
        chat(tool_choice="required")
    assert chat(tool_choice="auto") == chat()
    with pytest.raises(BadField, match=r"tools\.0\.function\.name is missing"):
        chat(tools=[{"type": "function", "function": {}}])


def test_tool_choice() -> None:
    named = {"type": "function", "function": {"name": TOOL["function"]["name"]}}

    def use(**fields: Any) -> ToolUse:
        return chat(tools=[TOOL], **fields).tool_use

    assert use() == use(tool_choice="auto") == use(parallel_tool_calls=True) == ToolUse()
    assert (
        use(tool_choice="none", parallel_tool_calls=False) == chat(parallel_tool_calls=False).tool_use == ToolUse()
    )
    assert use(tool_choice="required") == ToolUse(required=True)
    assert use(tool_choice=named, parallel_tool_calls=False) == ToolUse(name="f", parallel=False)
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        assert use(tool_choice=allowed) == ToolUse(required=mode == "required", allowed=("f",))
    for choice in (
        {"type": "function", "function": {"name": "g"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "function", "function": "f"},
        ["auto"],
    ):
        with pytest.raises(BadField, match="tool") as caught:
            use(tool_choice=choice)
        assert str(caught.value.param).startswith("tool_choice")


def test_formats_of_the_answer_become_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    described = {"name": "pair", "strict": True, "schema": schema}
    asked = chat(response_format={"type": "json_schema", "json_schema": described})
    assert asked.params.grammar is not None and asked.params.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(asked.params.grammar.text) == schema
    assert chat(response_format={"type": "json_object"}).params.grammar == Grammar(GrammarKind.JSON)
    assert chat(response_format={"type": "text"}).params.grammar is None
    with pytest.raises(BadField, match=r"response_format\.json_schema is missing"):
        chat(response_format={"type": "json_schema"})
    with pytest.raises(BadField, match=r"response_format\.type"):
        chat(response_format={"type": "xml"})


def test_effort_and_arguments_reach_the_template() -> None:
    assert chat(reasoning_effort="low").template_arguments == {"reasoning_effort": "low"}
    assert chat(reasoning_effort="none").think is False
    asked = chat(chat_template_kwargs={"enable_thinking": False})
    assert (asked.template_arguments, asked.think) == ({"enable_thinking": False}, None)


def test_streams() -> None:
    asked = chat(stream=True, stream_options={"include_usage": True})
    assert asked.stream and asked.include_usage


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_json_that_two_readers_would_understand_differently_is_refused(text: bytes) -> None:
    with pytest.raises(UsageError):
        parse_json_object(text)


@pytest.mark.parametrize("name", ["metadata", "stop", "chat_template_kwargs"])
def test_a_body_nested_too_deeply_is_rejected(name: str) -> None:
    parse_json_object(f'{{"{name}": {"[" * 200}{"]" * 200}}}')
    for deep in (300, 900, 100_000):
        with pytest.raises(UsageError, match=r"nested deeper than 256 levels|recursion"):
            parse_json_object(f'{{"{name}": {"[" * deep}{"]" * deep}}}')


def test_numbers_out_of_range_are_rejected() -> None:
    with pytest.raises(UsageError, match="1e999 is not a JSON number"):
        parse_json_object('{"chat_template_kwargs": {"depth": 1e999}}')
    with pytest.raises(BadField, match="logit_bias has the key"):
        chat(logit_bias={"9" * 5000: 1})


def test_characters_beyond_the_first_plane_are_no_surrogates() -> None:
    assert parse_json_object(b'{"a": "\\ud83e\\udd8a"}') == {"a": "\U0001f98a"}
