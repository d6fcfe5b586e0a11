"""Responses that are kept for a while in memory, so that a later one may follow them by `previous_response_id`."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import BadField, UnknownResponse

JsonObject = dict[str, Any]

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20  # of JSON, of all together; each holds the conversation up to it


@dataclass(frozen=True)
class KeptResponse:
    items: list[Any]  # the input, behind what came before it
    response: JsonObject
    size: int  # bytes of JSON


class KeptResponses:
    """The newest; the ones that were used the longest ago give way."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.by_id: OrderedDict[str, KeptResponse] = OrderedDict()
        self.bytes = 0

    def get(self, response_id: str) -> KeptResponse:
        """Raises UnknownResponse."""
        if response_id not in self.by_id:
            remedy = "responses are kept in memory, the newest alone: send the whole conversation as input"
            raise UnknownResponse(f"there is no response {response_id[:80]!r}", remedy)
        self.by_id.move_to_end(response_id)
        return self.by_id[response_id]

    def remove(self, response_id: str) -> None:
        """Raises UnknownResponse."""
        self.bytes -= self.get(response_id).size
        del self.by_id[response_id]

    def add(self, items: list[Any], response: JsonObject) -> None:
        size = len(json.dumps([items, response]))
        self.by_id[response["id"]] = KeptResponse(items, response, size)
        self.bytes += size
        while len(self.by_id) > self.max_responses or (self.bytes > self.max_bytes and len(self.by_id) > 1):
            self.remove(next(iter(self.by_id)))

    def expand(self, body: Mapping[str, Any]) -> JsonObject:
        """The body with the whole conversation as its input: behind that of `previous_response_id`, and with items
        for those that are named by `item_reference`. Raises BadField and UnknownResponse."""
        fields = dict(body)
        previous, given = fields.get("previous_response_id"), fields.get("input")
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list):
            return fields
        references = [item for item in given if isinstance(item, Mapping) and item.get("type") == "item_reference"]
        if not references and not isinstance(previous, str):
            return fields
        before = self.get(previous) if isinstance(previous, str) else None
        earlier = [*before.items, *before.response["output"]] if before else []
        ids = (
            {item["id"]: item for kept in self.by_id.values() for item in kept.response["output"]}
            if references
            else {}
        )
        if missing := next((item for item in references if item.get("id") not in ids), None):
            raise BadField("input", f"there is no item {str(missing.get('id'))[:80]!r}", "send the item itself")
        return fields | {"input": [*earlier, *(ids[item["id"]] if item in references else item for item in given)]}
