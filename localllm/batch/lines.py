"""One line of a batch in OpenAI's format: its request, and the output line with its answer.

A line that is not a request has an answer whose `response` is null and whose `error` gives the reason; a failed
request has a response with a status and an error body, as over HTTP. An answer depends only on its line, the model
and the batch's seed, not on time or chance. Independent of files and the engine.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.api.body import parse_json_object
from localllm.api.openai.requests import parse_chat_request, parse_completion_request
from localllm.api.openai.responses import (
    JsonObject,
    ResponseHeader,
    chat_completion_object,
    error_object,
    text_completion_object,
)
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.errors import BadField, LocalLLMError, UsageError
from localllm.request import SEED_BITS, Completion, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_LINE_BYTES = 64 * 2**20  # per line
CREATED = 0  # constant: a timestamp would make every run's output different


@dataclass(frozen=True)
class LineError:
    """Why a line is not a request; the codes are OpenAI's if there is one."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class BatchLine:
    number: int  # in the input, from 1, counting empty lines
    custom_id: str | None
    is_chat: bool
    body: Mapping[str, Any]
    error: LineError | None
    batch_seed: int

    @property
    def line_id(self) -> str:
        """24 hexadecimal digits that are unique in the batch."""
        return self.digest(self.number)[:24]

    @property
    def seed(self) -> int:
        """The seed for a line without one: independent of the line's position."""
        return int(self.digest(None), 16) >> (256 - SEED_BITS)

    def digest(self, number: int | None) -> str:
        return hashlib.sha256(json.dumps([self.batch_seed, number, self.custom_id]).encode()).hexdigest()

    def parse_request(self, model: str, defaults: SamplingParams) -> ParsedRequest:
        """model: the one that answers, regardless of the body. Raises UsageError."""
        parse = parse_chat_request if self.is_chat else parse_completion_request
        request = parse({**self.body, "model": model}, replace(defaults, seed=self.seed))
        if request.stream:
            raise BadField("stream", "a batch cannot be streamed", "leave it out")
        return request

    def success_object(
        self, request: ParsedRequest, completions: Sequence[Completion], texts: TokenTexts, fingerprint: str
    ) -> JsonObject:
        """Return the answer without cached tokens, which depend on concurrent requests."""
        header = ResponseHeader(
            f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.line_id}", CREATED, request.model, fingerprint
        )
        if self.is_chat:
            return self._responded(
                200, chat_completion_object(header, request, completions, texts, with_cached_tokens=False)
            )
        return self._responded(
            200, text_completion_object(header, request, completions, texts, with_cached_tokens=False)
        )

    def failure_object(self, error: LocalLLMError) -> JsonObject:
        """Return the answer for a request that is invalid, exceeds the context or failed."""
        return self._responded(error.http_status, error_object(error))

    def invalid_line_object(self, fault: LineError) -> JsonObject:
        error = {"code": fault.code, "message": fault.message, "param": fault.param, "line": self.number}
        return {"id": f"batch_req_{self.line_id}", "custom_id": self.custom_id, "response": None, "error": error}

    def _responded(self, status: int, body: JsonObject) -> JsonObject:
        response = {"status_code": status, "request_id": f"req_{self.line_id}", "body": body}
        return {
            "id": f"batch_req_{self.line_id}",
            "custom_id": self.custom_id,
            "response": response,
            "error": None,
        }


def read_line(text: bytes, number: int, batch_seed: int, is_new: Callable[[str], bool]) -> BatchLine:
    """Parse an input line. is_new: returns whether a custom_id has not occurred before."""
    custom_id, is_chat, body = None, False, {}
    try:
        fields = _parsed(text)
        custom_id = _string(fields, "custom_id")
        if not is_new(custom_id):
            raise _InvalidLine(
                "duplicate_custom_id", f"custom_id {custom_id!r} is used in an earlier line", "custom_id"
            )
        if _string(fields, "method") != "POST":
            raise _InvalidLine("invalid_method", f"method is {fields['method']!r}; send POST", "method")
        url, body = _string(fields, "url"), fields.get("body")
        if url not in (CHAT, COMPLETIONS):
            raise _InvalidLine("invalid_url", f"url is {url!r}; send {CHAT} or {COMPLETIONS}", "url")
        if not isinstance(body, dict):
            raise _InvalidLine("missing_required_parameter", "body is missing or not an object", "body")
        if unknown := sorted(fields.keys() - {"custom_id", "method", "url", "body"}):
            raise _InvalidLine("unknown_parameter", f"{unknown[0]} is not a field of a batch's line", unknown[0])
        is_chat = url == CHAT
    except _InvalidLine as error:
        return BatchLine(number, custom_id, is_chat, {}, error.error, batch_seed)
    return BatchLine(number, custom_id, is_chat, body, None, batch_seed)


def encode_line(answer: JsonObject) -> bytes:
    """Return one line of the output, including its line break."""
    return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class _InvalidLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None):
        self.error = LineError(code, message, param)


def _parsed(text: bytes) -> Mapping[str, Any]:
    if len(text) > MAX_LINE_BYTES:
        raise _InvalidLine("invalid_json_line", f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        return parse_json_object(text.decode())
    except UnicodeDecodeError as error:
        raise _InvalidLine("invalid_json_line", f"the line is not valid UTF-8 at byte {error.start}") from None
    except UsageError as error:
        raise _InvalidLine("invalid_json_line", f"the line is not a JSON object: {error.message}") from None


def _string(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise _InvalidLine("missing_required_parameter", f"{name} is missing or not a string", name)
    return value
