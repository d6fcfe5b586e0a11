"""Input items of the Responses API become chat messages, one per turn."""

from typing import Any

import pytest

from localllm.api.openai.responses_api.requests import messages_from_input
from localllm.errors import BadField

THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I call", "annotations": [], "logprobs": []}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_items_of_one_turn_become_one_message() -> None:
    items = [{"role": "user", "content": "Well?"}, THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, RESULT, SAID]
    assert messages_from_input(items, "Be short.") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Well?"},
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "hm",
            "tool_calls": [call("c1"), call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "I call"},
    ]


def test_consecutive_messages_stay_separate() -> None:
    roles = [message["content"] for message in messages_from_input([SAID, SAID, THOUGHT, SAID], None)]
    assert roles == ["I call", "I call", "I call"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("text", "input.0.type"),
        ({"type": "item_reference", "id": "x"}, "input.0.type"),
        ({"role": "tool", "content": "x"}, "input.0.role"),
        ({"role": "user"}, "input.0.content"),
        ({"role": "user", "content": 5}, "input.0.content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input.0.content.0.type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.0.content.0.text"),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, "input.0.type"),
        (CALL | {"arguments": {}}, "input.0.arguments"),
    ],
)
def test_an_invalid_item_is_rejected_with_its_position(item: Any, param: str) -> None:
    with pytest.raises(BadField) as caught:
        messages_from_input([item], None)
    assert caught.value.param == param
