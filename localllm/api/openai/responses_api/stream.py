"""Answers of `/v1/responses`: output items and the events that build them. A response that is not streamed is the
object of the last event."""

from typing import Any

from localllm.api.openai.responses import JsonObject, ResponseHeader, chat_logprobs, usage_object
from localllm.api.openai.responses_api.requests import ResponseBody
from localllm.api.openai.responses_api.tools import call_item, declare_tools
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import EventType, FinishReason, GenerationEvent, TokenLogprob, ToolCall

PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}  # by item type; also in event names
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # by item type
ID_PREFIXES |= {"custom_tool_call": "ctc", "local_shell_call": "lsh"}


class ResponseStream:
    """Numbered events of one response."""

    def __init__(self, header: ResponseHeader, body: ResponseBody, parsed: ParsedRequest, token_texts: TokenTexts):
        self.header = header
        self.token_texts = token_texts
        self.echoed_fields = _echoed_fields(body, parsed)
        self.tools = declare_tools(body.tools or [])
        self.with_logprobs = parsed.params.logprobs is not None
        self.status = "in_progress"
        self.incomplete_reason: str | None = None
        self.error: JsonObject | None = None
        self.metrics: Metrics | None = None
        self.output: list[JsonObject] = []  # the last may be open
        self.item_is_open = False
        self.pending_logprobs: list[TokenLogprob] = []  # of tokens whose text is not complete yet
        self.event_count = 0

    def start_events(self) -> list[JsonObject]:
        return [self.response_event("created"), self.response_event("in_progress")]

    def events_for(self, event: GenerationEvent) -> list[JsonObject]:
        """Response events for an event of the engine."""
        events: list[JsonObject] = []
        if event.kind is EventType.CONTENT:
            self.pending_logprobs += event.logprobs
        if event.tool_call:
            events += [*self.close_item(), *self.add_function_call(event.tool_call)]
        elif event.text:
            events += self.append_text("reasoning" if event.kind is EventType.REASONING else "message", event.text)
        if event.finish_reason:
            events += self.finish(event.finish_reason, event.metrics)
        return events

    def finish(self, reason: FinishReason, metrics: Metrics | None) -> list[JsonObject]:
        events = [] if self.output else self.append_text("message", "")
        is_cut_off = reason is FinishReason.LENGTH
        self.metrics, self.status = metrics, "incomplete" if is_cut_off else "completed"
        self.incomplete_reason = "max_output_tokens" if is_cut_off else None
        return [*events, *self.close_item(self.status), self.response_event(self.status)]

    def fail(self, error: LocalLLMError) -> list[JsonObject]:
        """Events that end a stream after an error."""
        self.status, self.error = "failed", {"code": "server_error", "message": str(error)}
        return [self.event("error", **self.error, param=None), self.response_event("failed")]

    def append_text(self, item_type: str, text: str) -> list[JsonObject]:
        """Append to the open item of this type, or to a new one."""
        events: list[JsonObject] = []
        if not self.item_is_open or self.output[-1]["type"] != item_type:
            events = [*self.close_item(), *self.open_item(item_type)]
        part = self.output[-1]["content"][0]
        part["text"] += text
        logprobs = self.flush_logprobs(part)
        delta = self.item_event(f"{PART_TYPES[item_type]}.delta", content_index=0, delta=text, **logprobs)
        return [*events, delta]

    def open_item(self, item_type: str) -> list[JsonObject]:
        item = self.new_item(item_type, content=[])
        item |= {"role": "assistant"} if item_type == "message" else {"summary": []}
        added = self.output_item_event("added")
        part: JsonObject = {"type": PART_TYPES[item_type], "text": ""}
        if item_type == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        self.item_is_open = True
        return [added, self.item_event("content_part.added", content_index=0, part=_copy(part))]

    def close_item(self, status: str = "completed") -> list[JsonObject]:
        """Close the open item, if there is one."""
        if not self.item_is_open:
            return []
        self.item_is_open, item = False, self.output[-1]
        item["status"], part = status, item["content"][0]
        self.flush_logprobs(part)
        fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self.item_event(f"{PART_TYPES[item['type']]}.done", content_index=0, **fields),
            self.item_event("content_part.done", content_index=0, part=_copy(part)),
            self.output_item_event("done"),
        ]

    def add_function_call(self, call: ToolCall) -> list[JsonObject]:
        """Add a tool call, whose arguments are known in full."""
        fields = call_item(call, self.tools)
        item_type, field = fields.pop("type"), "input" if "input" in fields else "arguments"
        arguments = {field: fields.pop(field)} if field in fields else {}  # sent as a delta
        item = self.new_item(item_type, **fields, **dict.fromkeys(arguments, ""))
        added = self.output_item_event("added")
        item |= {**arguments, "status": "completed"}
        events = [added]
        if arguments:
            name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
            named = {"name": item["name"]} if field == "arguments" else {}
            events += [self.item_event(f"{name}.delta", delta=arguments[field])]
            events += [self.item_event(f"{name}.done", **named, **arguments)]
        return [*events, self.output_item_event("done")]

    def new_item(self, item_type: str, **fields: Any) -> JsonObject:
        """Append an item to the output."""
        item_id = f"{ID_PREFIXES[item_type]}_{self.header.id.removeprefix('resp_')}{len(self.output)}"
        self.output.append({"type": item_type, "id": item_id, "status": "in_progress", **fields})
        return self.output[-1]

    def flush_logprobs(self, part: JsonObject) -> JsonObject:
        """Move pending log probabilities to a part, and return them as fields of its event."""
        if "logprobs" not in part:
            return {}
        new: list[JsonObject] = []
        if self.with_logprobs:
            new = chat_logprobs(self.pending_logprobs, self.token_texts)["content"]
        self.pending_logprobs = []
        part["logprobs"] = part["logprobs"] + new
        return {"logprobs": new}

    def event(self, event_type: str, **fields: Any) -> JsonObject:
        self.event_count += 1
        return {"type": event_type, "sequence_number": self.event_count - 1, **fields}

    def response_event(self, name: str) -> JsonObject:
        return self.event(f"response.{name}", response=self.response())

    def output_item_event(self, name: str) -> JsonObject:
        """An event with the last item in its current state."""
        index = len(self.output) - 1
        return self.event(f"response.output_item.{name}", output_index=index, item=_copy(self.output[index]))

    def item_event(self, name: str, /, **fields: Any) -> JsonObject:
        """An event about the content of the last item."""
        index = len(self.output) - 1
        return self.event(f"response.{name}", output_index=index, item_id=self.output[index]["id"], **fields)

    def response(self) -> JsonObject:
        """The response object in its current state."""
        return {
            "id": self.header.id,
            "object": "response",
            "created_at": self.header.created,
            "status": self.status,
            "model": self.header.model,
            "output": [_copy(item) for item in self.output],
            "error": self.error,
            "incomplete_details": {"reason": self.incomplete_reason} if self.incomplete_reason else None,
            "usage": _usage(self.metrics) if self.metrics else None,
            **self.echoed_fields,
        }


def _echoed_fields(body: ResponseBody, parsed: ParsedRequest) -> JsonObject:
    """Fields of the request that the response repeats, with defaults filled in."""
    text, params = body.text, parsed.params
    text_format = (
        text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    )
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "background": False,
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": text_format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
    }


def _usage(metrics: Metrics) -> JsonObject:
    counts = usage_object([metrics])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def _copy(item: JsonObject) -> JsonObject:
    """Copy of an item or part for an event, as the original grows afterwards."""
    return {name: list(map(dict, value)) if isinstance(value, list) else value for name, value in item.items()}
