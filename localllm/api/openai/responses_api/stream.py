"""An answer as `/v1/responses` tells it: items of output, and the events in which they grow. A response that is
not streamed is what the last event says. Identifiers and times are the caller's. Knows nothing of HTTP.
"""

from typing import Any

from localllm.api.openai.responses import JsonObject, ResponseHeader, chat_logprobs, usage_object
from localllm.api.openai.responses_api.requests import ResponseBody
from localllm.api.openai.responses_api.tools import call_item, declare_tools
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import EventType, FinishReason, GenerationEvent, TokenLogprob, ToolCall

PART_TYPES = {
    "message": "output_text",
    "reasoning": "reasoning_text",
}  # of an item of each type, and its events' name
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # before their ids
ID_PREFIXES |= {"custom_tool_call": "ctc", "local_shell_call": "lsh"}


class ResponseStream:
    """Events of one response, each with its number."""

    def __init__(self, header: ResponseHeader, body: ResponseBody, asked: ParsedRequest, token_texts: TokenTexts):
        self.header = header
        self.token_texts = token_texts
        self.echoed_fields = _told(body, asked)
        self.tools = declare_tools(body.tools or [])
        self.with_logprobs = asked.params.logprobs is not None
        self.status = "in_progress"
        self.incomplete_reason: str | None = None  # why it is incomplete
        self.error: JsonObject | None = None
        self.metrics: Metrics | None = None
        self.output: list[JsonObject] = []  # the last may be open
        self.item_is_open = False
        self.pending_logprobs: list[TokenLogprob] = []  # of tokens without a text of their own yet
        self.event_count = 0

    def start_events(self) -> list[JsonObject]:
        return [self.response_event("created"), self.response_event("in_progress")]

    def events_for(self, event: GenerationEvent) -> list[JsonObject]:
        """The events that a piece of the answer makes."""
        made: list[JsonObject] = []
        if event.kind is EventType.CONTENT:
            self.pending_logprobs += event.logprobs
        if event.tool_call:
            made += [*self.close_item(), *self.add_function_call(event.tool_call)]
        elif event.text:
            made += self.append_text("reasoning" if event.kind is EventType.REASONING else "message", event.text)
        if event.finish_reason:
            made += self.finish(event.finish_reason, event.metrics)
        return made

    def finish(self, reason: FinishReason, metrics: Metrics | None) -> list[JsonObject]:
        made = [] if self.output else self.append_text("message", "")
        cut = reason is FinishReason.LENGTH
        self.metrics, self.status = metrics, "incomplete" if cut else "completed"
        self.incomplete_reason = "max_output_tokens" if cut else None
        return [*made, *self.close_item(self.status), self.response_event(self.status)]

    def fail(self, error: LocalLLMError) -> list[JsonObject]:
        """What ends a stream that cannot go on."""
        self.status, self.error = "failed", {"code": "server_error", "message": str(error)}
        return [self.event("error", **self.error, param=None), self.response_event("failed")]

    def append_text(self, item_type: str, text: str) -> list[JsonObject]:
        """More of a message or of thoughts, which begin with it unless they are open."""
        made = (
            []
            if self.item_is_open and self.output[-1]["type"] == item_type
            else [*self.close_item(), *self.open_item(item_type)]
        )
        part = self.output[-1]["content"][0]
        part["text"] += text
        told = self.flush_logprobs(part)
        return [*made, self.item_event(f"{PART_TYPES[item_type]}.delta", content_index=0, delta=text, **told)]

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
        """End the item that is open, if one is."""
        if not self.item_is_open:
            return []
        self.item_is_open, item = False, self.output[-1]
        item["status"], part = status, item["content"][0]
        self.flush_logprobs(part)
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self.item_event(f"{PART_TYPES[item['type']]}.done", content_index=0, **told),
            self.item_event("content_part.done", content_index=0, part=_copy(part)),
            self.output_item_event("done"),
        ]

    def add_function_call(self, call: ToolCall) -> list[JsonObject]:
        """A function that is to be called, which is known as a whole."""
        fields = call_item(call, self.tools)
        kind, field = fields.pop("type"), "input" if "input" in fields else "arguments"
        grown = {field: fields.pop(field)} if field in fields else {}  # what comes piece by piece
        item = self.new_item(kind, **fields, **dict.fromkeys(grown, ""))
        added = self.output_item_event("added")
        item |= {**grown, "status": "completed"}
        events = [added]
        if grown:
            name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
            named = {"name": item["name"]} if field == "arguments" else {}
            events += [self.item_event(f"{name}.delta", delta=grown[field])]
            events += [self.item_event(f"{name}.done", **named, **grown)]
        return [*events, self.output_item_event("done")]

    def new_item(self, item_type: str, **fields: Any) -> JsonObject:
        """A new item at the end of the output."""
        name = f"{ID_PREFIXES[item_type]}_{self.header.id.removeprefix('resp_')}{len(self.output)}"
        self.output.append({"type": item_type, "id": name, "status": "in_progress", **fields})
        return self.output[-1]

    def flush_logprobs(self, part: JsonObject) -> JsonObject:
        """Those that wait, told with a part of a message from now on."""
        if "logprobs" not in part:
            return {}
        found = chat_logprobs(self.pending_logprobs, self.token_texts)["content"] if self.with_logprobs else []
        self.pending_logprobs = []
        part["logprobs"] = part["logprobs"] + found
        return {"logprobs": found}

    def event(self, event_type: str, **fields: Any) -> JsonObject:
        self.event_count += 1
        return {"type": event_type, "sequence_number": self.event_count - 1, **fields}

    def response_event(self, what: str) -> JsonObject:
        return self.event(f"response.{what}", response=self.response())

    def output_item_event(self, what: str) -> JsonObject:
        """About the last item as it is now."""
        at = len(self.output) - 1
        return self.event(f"response.output_item.{what}", output_index=at, item=_copy(self.output[at]))

    def item_event(self, what: str, **fields: Any) -> JsonObject:
        """About what is in the last item."""
        at = len(self.output) - 1
        return self.event(f"response.{what}", output_index=at, item_id=self.output[at]["id"], **fields)

    def response(self) -> JsonObject:
        """As it is now."""
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


def _told(body: ResponseBody, asked: ParsedRequest) -> JsonObject:
    """What was asked, and what stands where nothing was."""
    text, params = body.text, asked.params
    form = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
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
        "text": {"format": form},
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
    """As it is now: items and their parts grow after they were told."""
    return {name: list(map(dict, value)) if isinstance(value, list) else value for name, value in item.items()}
