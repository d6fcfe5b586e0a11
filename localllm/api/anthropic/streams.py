"""An answer piece by piece, as Anthropic's API streams it: events with a type, a block of content after the other.

Knows nothing of HTTP.
"""

from localllm.api.anthropic.responses import (
    Object,
    head,
    stop_reason,
    text_block,
    thinking_block,
    tool_block,
    usage,
)
from localllm.request import GenerationEvent, Kind, Request

BLOCKS = {Kind.CONTENT: text_block, Kind.REASONING: thinking_block}
DELTAS = {Kind.CONTENT: ("text_delta", "text"), Kind.REASONING: ("thinking_delta", "thinking")}


class MessageStream:
    """Events of one answer: `begin`, then `push` of each piece."""

    def __init__(self, id: str, model: str, request: Request):
        self.id = id
        self.model = model
        self.request = request
        self.index = -1  # of the block
        self.kind: Kind | None = None  # of the block that is open
        self.called = False

    def begin(self) -> list[Object]:
        """What of the prompt was found in the cache is known at the end."""
        counts = {"input_tokens": len(self.request.prompt_ids), "output_tokens": 0}
        message = {**head(self.id, self.model), "usage": counts}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def push(self, event: GenerationEvent) -> list[Object]:
        events: list[Object] = []
        if event.tool_call:
            self.called = True
            call = event.tool_call
            events += [*self.close(), self.open(tool_block(call))]
            events += [self.delta("input_json_delta", "partial_json", call.arguments), *self.close()]
        elif event.text:
            if event.kind is not self.kind:
                events += [*self.close(), self.open(BLOCKS[event.kind]())]
                self.kind = event.kind
            events.append(self.delta(*DELTAS[event.kind], event.text))
        if event.finish_reason:
            events += [*self.close(), *self.end(event)]
        return events

    def open(self, block: Object) -> Object:
        self.index += 1
        self.kind = Kind.TOOL_CALL
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def delta(self, kind: str, name: str, text: str) -> Object:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: text}}

    def close(self) -> list[Object]:
        if self.kind is None:
            return []
        self.kind = None
        return [{"type": "content_block_stop", "index": self.index}]

    def end(self, event: GenerationEvent) -> list[Object]:
        assert event.finish_reason and event.metrics
        reason = stop_reason(
            event.finish_reason, event.metrics, self.request.params, called=self.called, stop=event.stop_string
        )
        return [
            {"type": "message_delta", "delta": reason, "usage": usage(event.metrics)},
            {"type": "message_stop"},
        ]
