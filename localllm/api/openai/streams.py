"""An answer piece by piece, as OpenAI's API streams it: chunks of `chat.completion.chunk` and `text_completion`.

A caller sends each as one server-sent event, then `[DONE]`. Knows nothing of HTTP.
"""

from collections.abc import Sequence

from localllm.api.asked import Asked
from localllm.api.openai.logprobs import chat_logprobs, text_logprobs, told
from localllm.api.openai.responses import Object, Stamp, echoed, finish_reason, reasoning, tool_call, usage
from localllm.api.openai.timings import Timings
from localllm.api.tokens import TokenTexts
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, Kind, Request, TokenLogprob


class ChatStream:
    """Chunks of one answer to messages, which is choice `index`. The first names the role, the last says why it
    ended."""

    def __init__(self, stamp: Stamp, asked: Asked, texts: TokenTexts, index: int = 0):
        self.asked = asked
        self.texts = texts
        self.index = index
        self.head = _head(stamp.head("chat.completion.chunk"), asked)
        self.begun = False
        self.calls = 0
        self.timings = Timings() if asked.timings else None

    def push(self, event: GenerationEvent) -> list[Object]:
        """The chunks that an event makes, often one; after the last event `usage_chunk` follows."""
        chunks: list[Object] = []
        timings = self.timings and self.timings.push(event)
        if not self.begun:
            self.begun = True
            chunks.append(self.chunk({"role": "assistant", "content": ""}))
        if event.text or event.tool_call or event.logprobs or (timings and event.token_ids):
            chunks.append(self.chunk(self.delta(event), event.logprobs))
        if event.finish_reason:
            called = self.calls > 0 and self.asked.tool_use.name is None
            reason = finish_reason(event.finish_reason, called=called)
            chunks.append(self.chunk({}, reason=reason))
        if timings and chunks:
            chunks[-1]["timings"] = timings
        return chunks

    def delta(self, event: GenerationEvent) -> Object:
        if event.tool_call:
            self.calls += 1
            return {"tool_calls": [{"index": self.calls - 1, **tool_call(event.tool_call)}]}
        return reasoning(event.text) if event.kind is Kind.REASONING else {"content": event.text}

    def chunk(self, delta: Object, logprobs: Sequence[TokenLogprob] = (), reason: str | None = None) -> Object:
        told = chat_logprobs(logprobs, self.texts) if logprobs else None
        choice = {"index": self.index, "delta": delta, "logprobs": told, "finish_reason": reason}
        return {**self.head, "choices": [choice]}


class TextStream:
    """Chunks of the continuation of one text, which is choice `index`."""

    def __init__(self, stamp: Stamp, asked: Asked, request: Request, texts: TokenTexts, index: int = 0):
        self.asked = asked
        self.texts = texts
        self.index = index
        self.head = _head(stamp.head("text_completion"), asked)
        self.prompt_ids = request.prompt_ids if asked.echo else ()  # not told yet
        self.prompt_logprobs: list[TokenLogprob] = []
        self.offset = 0  # characters told

    def push(self, event: GenerationEvent) -> list[Object]:
        """The chunks that an event makes, often one; after the last event of all choices `usage_chunk` follows."""
        self.prompt_logprobs += event.prompt_logprobs
        if not (event.text or event.token_ids or event.finish_reason):
            return []  # a part of a long prompt
        said = told(self.prompt_ids, self.prompt_logprobs, event.logprobs)
        choice = {
            "index": self.index,
            "text": echoed(self.asked, self.prompt_ids, self.texts) + event.text,
            "logprobs": text_logprobs(said, self.texts, self.offset)
            if self.asked.params.logprobs is not None
            else None,
            "finish_reason": event.finish_reason and finish_reason(event.finish_reason),
        }
        self.offset += sum(self.texts.characters(token) for token, _ in said)
        self.prompt_ids, self.prompt_logprobs = (), []
        return [{**self.head, "choices": [choice]}]


def usage_chunk(stamp: Stamp, asked: Asked, measured: Sequence[Metrics]) -> Object:
    """What follows the last chunk of all where `stream_options` asks for it. measured: in the order of choices."""
    kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
    return {**stamp.head(kind), "choices": [], "usage": usage(measured, asked.each)}


def _head(head: Object, asked: Asked) -> Object:
    """Where the usage is asked for, it is null in every chunk but the last."""
    return {**head, "usage": None} if asked.include_usage else head
