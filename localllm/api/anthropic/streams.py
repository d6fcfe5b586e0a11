"""An answer piece by piece, as Anthropic's API streams it: events with a type, a block of content after the other.

Knows nothing of HTTP.
"""

from localllm.api.anthropic.responses import (
    JsonObject,
    empty_message,
    stop_fields,
    text_block,
    thinking_block,
    tool_block,
    usage_object,
)
from localllm.request import EventType, GenerationEvent, Request

BLOCK_BUILDERS = {EventType.CONTENT: text_block, EventType.REASONING: thinking_block}
DELTA_FIELDS = {EventType.CONTENT: ("text_delta", "text"), EventType.REASONING: ("thinking_delta", "thinking")}


class MessageStream:
    """Events of one answer: `begin`, then `push` of each piece."""

    def __init__(self, id: str, model: str, request: Request):
        self.id = id
        self.model = model
        self.request = request
        self.block_index = -1  # of the block
        self.open_block_type: EventType | None = None  # of the block that is open
        self.called = False

    def start_events(self) -> list[JsonObject]:
        """What of the prompt was found in the cache is known at the end."""
        counts = {"input_tokens": len(self.request.prompt_ids), "output_tokens": 0}
        message = {**empty_message(self.id, self.model), "usage": counts}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def events_for(self, event: GenerationEvent) -> list[JsonObject]:
        events: list[JsonObject] = []
        if event.tool_call:
            self.called = True
            call = event.tool_call
            events += [*self.close_block(), self.open_block(tool_block(call))]
            events += [self.delta("input_json_delta", "partial_json", call.arguments), *self.close_block()]
        elif event.text:
            if event.kind is not self.open_block_type:
                events += [*self.close_block(), self.open_block(BLOCK_BUILDERS[event.kind]())]
                self.open_block_type = event.kind
            events.append(self.delta(*DELTA_FIELDS[event.kind], event.text))
        if event.finish_reason:
            events += [*self.close_block(), *self.end_events(event)]
        return events

    def open_block(self, block: JsonObject) -> JsonObject:
        self.block_index += 1
        self.open_block_type = EventType.TOOL_CALL
        return {"type": "content_block_start", "index": self.block_index, "content_block": block}

    def delta(self, delta_type: str, name: str, text: str) -> JsonObject:
        return {
            "type": "content_block_delta",
            "index": self.block_index,
            "delta": {"type": delta_type, name: text},
        }

    def close_block(self) -> list[JsonObject]:
        if self.open_block_type is None:
            return []
        self.open_block_type = None
        return [{"type": "content_block_stop", "index": self.block_index}]

    def end_events(self, event: GenerationEvent) -> list[JsonObject]:
        assert event.finish_reason and event.metrics
        reason = stop_fields(
            event.finish_reason, event.metrics, self.request.params, called=self.called, stop=event.stop_string
        )
        return [
            {"type": "message_delta", "delta": reason, "usage": usage_object(event.metrics)},
            {"type": "message_stop"},
        ]
