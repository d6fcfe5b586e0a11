"""Anthropic's answers: messages, their stream of events, usage, errors."""

import json
from typing import Any

from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import (
    Completion,
    EventType,
    FinishReason,
    GenerationEvent,
    Request,
    SamplingParams,
    ToolCall,
)

JsonObject = dict[str, Any]

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def message_object(id: str, model: str, params: SamplingParams, completion: Completion) -> JsonObject:
    """A complete answer: reasoning, text, tool calls."""
    content: list[JsonObject] = (
        [{**thinking_block(), "thinking": completion.reasoning}] if completion.reasoning else []
    )
    content += [{**text_block(), "text": completion.text}] if completion.text else []
    content += [{**tool_block(call), "input": json.loads(call.arguments)} for call in completion.tool_calls]
    reason = stop_fields(
        completion.finish_reason,
        completion.metrics,
        params,
        called=bool(completion.tool_calls),
        stop=completion.stop_string,
    )
    return empty_message(id, model) | {"content": content, **reason, "usage": usage_object(completion.metrics)}


def empty_message(id: str, model: str) -> JsonObject:
    """A message without content."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def text_block() -> JsonObject:
    return {"type": "text", "text": ""}


def thinking_block() -> JsonObject:
    """The signature is empty: reasoning that a client sends back is not verified."""
    return {"type": "thinking", "thinking": "", "signature": ""}


def tool_block(call: ToolCall) -> JsonObject:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def stop_fields(
    reason: FinishReason, metrics: Metrics, params: SamplingParams, *, called: bool, stop: str | None
) -> JsonObject:
    """`stop_reason` and `stop_sequence`. called: the answer has tool calls; stop: the stop string that ended
    it."""
    if reason is FinishReason.LENGTH:
        hit_limit = params.max_tokens is not None and metrics.output_tokens >= params.max_tokens
        return {
            "stop_reason": "max_tokens" if hit_limit else "model_context_window_exceeded",
            "stop_sequence": None,
        }
    stop_reason = "stop_sequence" if stop is not None else "tool_use" if called else "end_turn"
    return {"stop_reason": stop_reason, "stop_sequence": stop}


def usage_object(metrics: Metrics) -> JsonObject:
    """Token counts; in this API `input_tokens` excludes those found in the cache."""
    return {
        "input_tokens": metrics.prompt_tokens - metrics.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": metrics.cached_tokens,
        "output_tokens": metrics.output_tokens,
    }


def error_object(error: LocalLLMError, request_id: str) -> JsonObject:
    status = error.http_status
    error_type = ERROR_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": error_type, "message": str(error)}, "request_id": request_id}


BLOCK_BUILDERS = {EventType.CONTENT: text_block, EventType.REASONING: thinking_block}
DELTA_FIELDS = {EventType.CONTENT: ("text_delta", "text"), EventType.REASONING: ("thinking_delta", "thinking")}


class MessageStream:
    """Events of one streamed answer, one content block after the other."""

    def __init__(self, id: str, model: str, request: Request):
        self.id = id
        self.model = model
        self.request = request
        self.block_index = -1  # of the newest block
        self.open_block_type: EventType | None = None  # None if no block is open
        self.called = False

    def start_events(self) -> list[JsonObject]:
        """message_start and ping. The cached tokens are only known at the end."""
        counts = {"input_tokens": len(self.request.prompt_ids), "output_tokens": 0}
        message = {**empty_message(self.id, self.model), "usage": counts}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def events_for(self, event: GenerationEvent) -> list[JsonObject]:
        """Events of this API for an event of the engine."""
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
