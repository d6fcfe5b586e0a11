"""An answer as `/v1/responses` tells it: items of output, and the events in which they grow. A response that is
not streamed is what the last event says. Identifiers and times are the caller's. Knows nothing of HTTP.
"""

from typing import Any

from localllm.api.asked import Asked
from localllm.api.openai.logprobs import chat_logprobs
from localllm.api.openai.responses import Object, Stamp, usage
from localllm.api.openai.responses_api.bodies import ResponseBody
from localllm.api.tokens import TokenTexts
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import FinishReason, GenerationEvent, Kind, TokenLogprob, ToolCall

PART = {"message": "output_text", "reasoning": "reasoning_text"}  # of an item of each type, and its events' name
SHORT = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # before their ids


class ResponseStream:
    """Events of one response, each with its number."""

    def __init__(self, stamp: Stamp, body: ResponseBody, asked: Asked, texts: TokenTexts):
        self.stamp = stamp
        self.texts = texts
        self.told = _told(body, asked)
        self.with_logprobs = asked.params.logprobs is not None
        self.status = "in_progress"
        self.reason: str | None = None  # why it is incomplete
        self.error: Object | None = None
        self.metrics: Metrics | None = None
        self.output: list[Object] = []  # the last may be open
        self.open = False
        self.waiting: list[TokenLogprob] = []  # of tokens without a text of their own yet
        self.events = 0

    def begin(self) -> list[Object]:
        return [self.of_response("created"), self.of_response("in_progress")]

    def push(self, event: GenerationEvent) -> list[Object]:
        """The events that a piece of the answer makes."""
        made: list[Object] = []
        if event.kind is Kind.CONTENT:
            self.waiting += event.logprobs
        if event.tool_call:
            made += [*self.close(), *self.call(event.tool_call)]
        elif event.text:
            made += self.grow("reasoning" if event.kind is Kind.REASONING else "message", event.text)
        if event.finish_reason:
            made += self.finish(event.finish_reason, event.metrics)
        return made

    def finish(self, reason: FinishReason, metrics: Metrics | None) -> list[Object]:
        made = [] if self.output else self.grow("message", "")
        cut = reason is FinishReason.LENGTH
        self.metrics, self.status = metrics, "incomplete" if cut else "completed"
        self.reason = "max_output_tokens" if cut else None
        return [*made, *self.close(self.status), self.of_response(self.status)]

    def fail(self, error: LocalLLMError) -> list[Object]:
        """What ends a stream that cannot go on."""
        self.status, self.error = "failed", {"code": "server_error", "message": str(error)}
        return [self.event("error", **self.error, param=None), self.of_response("failed")]

    def grow(self, kind: str, text: str) -> list[Object]:
        """More of a message or of thoughts, which begin with it unless they are open."""
        made = [] if self.open and self.output[-1]["type"] == kind else [*self.close(), *self.add(kind)]
        part = self.output[-1]["content"][0]
        part["text"] += text
        told = self.take_logprobs(part)
        return [*made, self.of_item(f"{PART[kind]}.delta", content_index=0, delta=text, **told)]

    def add(self, kind: str) -> list[Object]:
        item = self.begun(kind, content=[])
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        added = self.of_output("added")
        part: Object = {"type": PART[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        self.open = True
        return [added, self.of_item("content_part.added", content_index=0, part=_copy(part))]

    def close(self, status: str = "completed") -> list[Object]:
        """End the item that is open, if one is."""
        if not self.open:
            return []
        self.open, item = False, self.output[-1]
        item["status"], part = status, item["content"][0]
        self.take_logprobs(part)
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self.of_item(f"{PART[item['type']]}.done", content_index=0, **told),
            self.of_item("content_part.done", content_index=0, part=_copy(part)),
            self.of_output("done"),
        ]

    def call(self, call: ToolCall) -> list[Object]:
        """A function that is to be called, which is known as a whole."""
        item = self.begun("function_call", call_id=call.id, name=call.name, arguments="")
        added = self.of_output("added")
        item |= {"arguments": call.arguments, "status": "completed"}
        return [
            added,
            self.of_item("function_call_arguments.delta", delta=call.arguments),
            self.of_item("function_call_arguments.done", name=call.name, arguments=call.arguments),
            self.of_output("done"),
        ]

    def begun(self, kind: str, **fields: Any) -> Object:
        """A new item at the end of the output."""
        name = f"{SHORT[kind]}_{self.stamp.id.removeprefix('resp_')}{len(self.output)}"
        self.output.append({"type": kind, "id": name, "status": "in_progress", **fields})
        return self.output[-1]

    def take_logprobs(self, part: Object) -> Object:
        """Those that wait, told with a part of a message from now on."""
        if "logprobs" not in part:
            return {}
        found = chat_logprobs(self.waiting, self.texts)["content"] if self.with_logprobs else []
        self.waiting = []
        part["logprobs"] = part["logprobs"] + found
        return {"logprobs": found}

    def event(self, kind: str, **fields: Any) -> Object:
        self.events += 1
        return {"type": kind, "sequence_number": self.events - 1, **fields}

    def of_response(self, what: str) -> Object:
        return self.event(f"response.{what}", response=self.response())

    def of_output(self, what: str) -> Object:
        """About the last item as it is now."""
        at = len(self.output) - 1
        return self.event(f"response.output_item.{what}", output_index=at, item=_copy(self.output[at]))

    def of_item(self, what: str, **fields: Any) -> Object:
        """About what is in the last item."""
        at = len(self.output) - 1
        return self.event(f"response.{what}", output_index=at, item_id=self.output[at]["id"], **fields)

    def response(self) -> Object:
        """As it is now."""
        return {
            "id": self.stamp.id,
            "object": "response",
            "created_at": self.stamp.created,
            "status": self.status,
            "model": self.stamp.model,
            "output": [_copy(item) for item in self.output],
            "error": self.error,
            "incomplete_details": {"reason": self.reason} if self.reason else None,
            "usage": _usage(self.metrics) if self.metrics else None,
            **self.told,
        }


def _told(body: ResponseBody, asked: Asked) -> Object:
    """What was asked, and what stands where nothing was."""
    text, params = body.text, asked.params
    form = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _usage(metrics: Metrics) -> Object:
    counts = usage([metrics])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def _copy(item: Object) -> Object:
    """As it is now: items and their parts grow after they were told."""
    return {name: list(map(dict, value)) if isinstance(value, list) else value for name, value in item.items()}
