"""Counts that are too large are refused by the name of their field, in the body of every API."""

from collections.abc import Callable
from typing import Any

import pytest

from localllm.api.anthropic.requests import read_message_request
from localllm.api.body import BadField
from localllm.api.limits import MESSAGES, PARTS, STOP_CHARACTERS, STOPS, TOOLS
from localllm.api.ollama.requests import read_chat, read_generate
from localllm.api.openai.responses_api.requests import read_response
from localllm.api.own import read_answer
from localllm.params import params_to_json
from localllm.request import SamplingParams

Read = Callable[[dict[str, Any]], object]

SAID = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
OWN: dict[str, Any] = {"prompt": "x", "tools": None, "template_arguments": {}}
OWN["params"] = params_to_json(SamplingParams())


def claude(body: dict[str, Any]) -> object:
    return read_message_request({"max_tokens": 4, "messages": [SAID], **body}, SamplingParams())


def response(body: dict[str, Any]) -> object:
    return read_response({"input": "x", **body}, SamplingParams())


def ours(body: dict[str, Any]) -> object:
    return read_answer({**OWN, **body})


CASES: list[tuple[Read, str, int, Callable[[int], dict[str, Any]]]] = [
    (read_chat, "messages", MESSAGES, lambda count: {"messages": [SAID] * count}),
    (read_chat, "tools", TOOLS, lambda count: {"tools": [TOOL] * count}),
    (read_chat, "options.stop", STOPS, lambda count: {"options": {"stop": ["x"] * count}}),
    (read_generate, "options.stop", STOP_CHARACTERS, lambda count: {"options": {"stop": ["x" * count]}}),
    (claude, "messages", MESSAGES, lambda count: {"messages": [SAID] * count}),
    (claude, "tools", TOOLS, lambda count: {"tools": [{"name": "f", "input_schema": {}}] * count}),
    (claude, "stop_sequences", STOPS, lambda count: {"stop_sequences": ["x"] * count}),
    (claude, "system", PARTS, lambda count: {"system": [{"type": "text", "text": "x"}] * count}),
    (response, "input", MESSAGES, lambda count: {"input": [SAID] * count}),
    (response, "tools", TOOLS, lambda count: {"tools": [{"type": "function", **FUNCTION}] * count}),
    (
        response,
        "input.0.content",
        PARTS,
        lambda count: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * count}]},
    ),
    (ours, "prompt", MESSAGES, lambda count: {"prompt": [SAID] * count}),
    (ours, "tools", TOOLS, lambda count: {"tools": [TOOL] * count}),
    (ours, "params.stop", STOPS, lambda count: {"params": {**OWN["params"], "stop": ["x"] * count}}),
]


@pytest.mark.parametrize(("read", "param", "most", "body"), CASES)
def test_one_more_than_the_limit_is_refused(
    read: Read, param: str, most: int, body: Callable[[int], dict[str, Any]]
) -> None:
    read({"model": "demo", **body(most)})
    with pytest.raises(BadField) as error:
        read({"model": "demo", **body(most + 1)})
    assert error.value.param == param
    assert f"{most:,}" in str(error.value)
