"""Counts above their limits are rejected by field name in every API."""

from collections.abc import Callable
from typing import Any

import pytest

from localllm.api.anthropic.requests import parse_message_request
from localllm.api.body import MAX_MESSAGES, MAX_PARTS, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOOLS
from localllm.api.ollama.requests import parse_chat_request, parse_generate_request
from localllm.api.openai.responses_api.requests import parse_response_request
from localllm.errors import BadField
from localllm.request import SamplingParams
from localllm.sampling import params_to_json
from localllm.server.native_api import parse_answer_request

Read = Callable[[dict[str, Any]], object]

SAID = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
OWN: dict[str, Any] = {"prompt": "x", "tools": None, "template_arguments": {}}
OWN["params"] = params_to_json(SamplingParams())


def claude(body: dict[str, Any]) -> object:
    return parse_message_request({"max_tokens": 4, "messages": [SAID], **body}, SamplingParams())


def response(body: dict[str, Any]) -> object:
    return parse_response_request({"input": "x", **body}, SamplingParams())


def ours(body: dict[str, Any]) -> object:
    return parse_answer_request({**OWN, **body})


CASES: list[tuple[Read, str, int, Callable[[int], dict[str, Any]]]] = [
    (parse_chat_request, "messages", MAX_MESSAGES, lambda count: {"messages": [SAID] * count}),
    (parse_chat_request, "tools", MAX_TOOLS, lambda count: {"tools": [TOOL] * count}),
    (parse_chat_request, "options.stop", MAX_STOPS, lambda count: {"options": {"stop": ["x"] * count}}),
    (
        parse_generate_request,
        "options.stop",
        MAX_STOP_CHARACTERS,
        lambda count: {"options": {"stop": ["x" * count]}},
    ),
    (claude, "messages", MAX_MESSAGES, lambda count: {"messages": [SAID] * count}),
    (claude, "tools", MAX_TOOLS, lambda count: {"tools": [{"name": "f", "input_schema": {}}] * count}),
    (claude, "stop_sequences", MAX_STOPS, lambda count: {"stop_sequences": ["x"] * count}),
    (claude, "system", MAX_PARTS, lambda count: {"system": [{"type": "text", "text": "x"}] * count}),
    (response, "input", MAX_MESSAGES, lambda count: {"input": [SAID] * count}),
    (response, "tools", MAX_TOOLS, lambda count: {"tools": [{"type": "function", **FUNCTION}] * count}),
    (
        response,
        "input.0.content",
        MAX_PARTS,
        lambda count: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * count}]},
    ),
    (ours, "prompt", MAX_MESSAGES, lambda count: {"prompt": [SAID] * count}),
    (ours, "tools", MAX_TOOLS, lambda count: {"tools": [TOOL] * count}),
    (ours, "params.stop", MAX_STOPS, lambda count: {"params": {**OWN["params"], "stop": ["x"] * count}}),
]


@pytest.mark.parametrize(("read", "param", "most", "body"), CASES)
def test_counts_above_the_limit_are_rejected(
    read: Read, param: str, most: int, body: Callable[[int], dict[str, Any]]
) -> None:
    read({"model": "demo", **body(most)})
    with pytest.raises(BadField) as error:
        read({"model": "demo", **body(most + 1)})
    assert error.value.param == param
    assert f"{most:,}" in str(error.value)
