"""Sends one request over HTTP and records its outcome. The same client serves all servers and four APIs:

    completions      POST /v1/completions        OpenAI's format: events that end with [DONE]
    chat             POST /v1/chat/completions
    ollama-generate  POST /api/generate          Ollama's format: one JSON object per line
    ollama-chat      POST /api/chat

Prompts are sent verbatim to `completions` and `ollama-generate`, and to the others as one user message, to which
the server's chat template is applied. The client connects only to the given host: proxies from the environment and
redirects are ignored.
"""

import asyncio
import json
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from localllm import __version__
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.errors import NetworkError, UsageError

Message = Mapping[str, Any]
CONNECT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20  # size of one message of a stream
MAX_REASON_CHARACTERS = 60  # of a server's error message
DONE = "[DONE]"
Clock = Callable[[], float]


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load, identical for every server."""

    prompt: str
    max_tokens: int  # maximum tokens of the answer
    ignore_eos: bool = False


@dataclass(frozen=True)
class StreamMessage:
    """The contents of one message of a stream. Counts are the server's own, None if not reported."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class ServerApi:
    """Requests and responses of one API."""

    path: str
    uses_sse: bool  # server-sent events, otherwise a JSON object per line
    # Body of a streamed request, given the model's name and the request.
    make_body: Callable[[str, LoadRequest], dict[str, Any]]
    parse_message: Callable[[Message], StreamMessage]


def _openai(model: str, ask: LoadRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": ask.max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return body | ({"ignore_eos": True} if ask.ignore_eos else {})


def _completions(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _openai(model, ask) | {"prompt": ask.prompt}


def _chat(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _openai(model, ask) | {"messages": [{"role": "user", "content": ask.prompt}]}


def _ollama(model: str, ask: LoadRequest) -> dict[str, Any]:
    return {"model": model, "stream": True, "options": {"num_predict": ask.max_tokens, "temperature": 0}}


def _ollama_generate(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _ollama(model, ask) | {"prompt": ask.prompt, "raw": True}


def _ollama_chat(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _ollama(model, ask) | {"messages": [{"role": "user", "content": ask.prompt}]}


def _read_openai(message: Message) -> StreamMessage:
    """Parse a chunk of either API: a completion's text, or everything in a chat's delta, including reasoning
    and calls.
    """
    if message.get("error") is not None:  # some servers send null with every message
        return StreamMessage(error=_sentence(message["error"]))
    choice = _first(message.get("choices"))
    delta = _mapping(choice.get("delta"))
    parts = [choice.get("text"), *(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))]
    calls = [_mapping(_first(delta.get("tool_calls")).get("function")).get(name) for name in ("name", "arguments")]
    usage = _mapping(message.get("usage"))
    return StreamMessage(
        text="".join(part for part in [*parts, *calls] if isinstance(part, str)),
        finish_reason=_text(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def _read_ollama(message: Message) -> StreamMessage:
    if message.get("error") is not None:  # some servers send null with every message
        return StreamMessage(error=_sentence(message["error"]))
    said = _mapping(message.get("message"))
    parts = [message.get("response"), message.get("thinking"), said.get("content"), said.get("thinking")]
    done = message.get("done") is True
    return StreamMessage(
        text="".join(part for part in parts if isinstance(part, str)),
        finish_reason=(_text(message.get("done_reason")) or "stop") if done else None,
        prompt_tokens=_count(message.get("prompt_eval_count")),
        output_tokens=_count(message.get("eval_count")),
    )


def _sentence(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _mapping(value: object) -> Message:
    return value if isinstance(value, Mapping) else {}


def _first(value: object) -> Message:
    return _mapping(value[0]) if isinstance(value, list) and value else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


SERVER_APIS = {
    "completions": ServerApi("/v1/completions", True, _completions, _read_openai),
    "chat": ServerApi("/v1/chat/completions", True, _chat, _read_openai),
    "ollama-generate": ServerApi("/api/generate", False, _ollama_generate, _read_ollama),
    "ollama-chat": ServerApi("/api/chat", False, _ollama_chat, _read_ollama),
}


class RequestError(Exception):
    """Why a request produced no answer."""


class LoadClient:
    """A connection to one server; `async with` closes it."""

    def __init__(self, url: str, timeout_s: float, clock: Clock = time.perf_counter):
        """timeout_s: of a whole request. Raises UsageError if `url` is invalid."""
        self.url = normalize_url(url)
        self.timeout_s = timeout_s
        self.clock = clock
        self.http = httpx2.AsyncClient(
            base_url=self.url,
            timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"User-Agent": f"localllm/{__version__}"},
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> "LoadClient":
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.http.__aexit__(*error)

    async def detect_api(self) -> str:
        """Return the name of the API that the server supports: `completions` or `ollama-generate`.

        Raises NetworkError.
        """
        if (await self.get_json("/v1/models")) is not None:
            return "completions"
        if (await self.get_json("/api/tags")) is not None:
            return "ollama-generate"
        raise NetworkError(
            f"{self.url} answers neither /v1/models nor /api/tags",
            f"specify it: --api {'|'.join(SERVER_APIS)}",
        )

    async def first_model(self, wire: ServerApi) -> str:
        """Return the first model that the server lists. Raises NetworkError if it lists none."""
        listing = await self.get_json("/v1/models" if wire.uses_sse else "/api/tags")
        models = (listing or {}).get("data" if wire.uses_sse else "models")
        first = models[0] if isinstance(models, list) and models else None
        name = first.get("id" if wire.uses_sse else "name") if isinstance(first, Mapping) else None
        if not isinstance(name, str):
            raise NetworkError(f"{self.url} lists no model", "give one before --against")
        return name

    async def get_json(self, path: str) -> Message | None:
        """Return the JSON object at a path, or None if there is none.

        Raises NetworkError if the server does not answer.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.http.get(path)
            body = answer.json() if answer.status_code == httpx2.codes.OK else None
        except (httpx2.HTTPError, TimeoutError) as error:
            raise NetworkError(
                f"{self.url} does not answer ({error_reason(error)})", "check that it is running"
            ) from error
        except ValueError:
            return None
        return body if isinstance(body, Mapping) else None

    async def count_prompt_tokens(self, wire: ServerApi, model: str, prompt: str) -> int | None:
        """Return the server's token count of a prompt, from a non-streamed answer of one token, since some servers
        report usage only there. Raises NetworkError if there is no answer.
        """
        body = wire.make_body(model, LoadRequest(prompt, 1)) | {"stream": False}
        body.pop("stream_options", None)
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.http.post(wire.path, json=body)
            if answer.status_code != httpx2.codes.OK:
                raise RequestError(http_error(answer.status_code, answer.content))
            return wire.parse_message(parse_message(answer.content)).prompt_tokens
        except (RequestError, httpx2.HTTPError, TimeoutError) as error:
            raise NetworkError(
                f"{self.url} does not answer a first request ({error_reason(error)})",
                "check --api, and the name of the model",
            ) from error

    async def send(
        self, wire: ServerApi, model: str, ask: LoadRequest, arrival: float | None = None
    ) -> RequestOutcome:
        """Send a request scheduled for `arrival` (None: now) and follow the answer. Failures are outcomes."""
        sent = self.clock()
        arrival = sent if arrival is None else arrival
        messages: list[tuple[float, StreamMessage]] = []
        error = None
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.read_stream(wire, wire.make_body(model, ask), messages)
        except (RequestError, httpx2.HTTPError, TimeoutError) as fault:
            error = error_reason(fault)
        return make_outcome(arrival, sent, messages, ask, error)

    async def read_stream(
        self, wire: ServerApi, body: Mapping[str, Any], messages: list[tuple[float, StreamMessage]]
    ) -> None:
        """Record each message with its time in `seen`. Raises RequestError for an incomplete answer."""
        async with self.http.stream("POST", wire.path, json=body) as response:
            if response.status_code != httpx2.codes.OK:
                raise RequestError(http_error(response.status_code, await response.aread()))
            async for message in read_sse(response) if wire.uses_sse else read_lines(response):
                received_at, piece = self.clock(), wire.parse_message(parse_message(message))
                if piece.error is not None:
                    raise RequestError(f"in the stream: {shorten_reason(piece.error)}")
                messages.append((received_at, piece))
        if not any(piece.finish_reason for _, piece in messages):
            raise RequestError("the answer was cut off")


def make_outcome(
    arrival: float,
    sent: float,
    messages: list[tuple[float, StreamMessage]],
    request: LoadRequest,
    error: str | None,
) -> RequestOutcome:
    """Return the outcome of the messages received."""
    last = next((time for time, message in messages if message.finish_reason), float("nan"))
    output = next(
        (message.output_tokens for _, message in reversed(messages) if message.output_tokens is not None), None
    )
    counted_by = None if output is None else "usage"
    if output is None and any(message.finish_reason == "length" for _, message in messages):
        output, counted_by = request.max_tokens, "limit"
    return RequestOutcome(
        arrival,
        sent,
        tuple(time for time, message in messages if message.text),
        last,
        next(
            (message.prompt_tokens for _, message in reversed(messages) if message.prompt_tokens is not None), None
        ),
        output,
        counted_by,
        error,
    )


async def read_sse(response: httpx2.Response) -> AsyncIterator[str]:
    """Yield the data of server-sent events, up to [DONE]."""
    async for event in httpx2.EventSource(response, max_event_size=MAX_MESSAGE_BYTES):
        if event.data == DONE:
            return
        if event.data:  # empty events only keep the connection open
            yield event.data


async def read_lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield non-empty lines. Raises RequestError for an endless line."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MAX_MESSAGE_BYTES:
            raise RequestError("a message is too long")
    if rest.strip():
        yield rest


def parse_message(message: str | bytes) -> Message:
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):
        raise RequestError("a message is not JSON") from None
    if not isinstance(value, Mapping):
        raise RequestError("a message is not a JSON object")
    return value


def http_error(status: int, body: bytes) -> str:
    """Return `HTTP 400: the server's message`."""
    try:
        error = parse_message(body).get("error")
        message = error.get("message") if isinstance(error, Mapping) else error
    except RequestError:
        message = None
    return f"HTTP {status}" + (f": {shorten_reason(message)}" if isinstance(message, str) else "")


def shorten_reason(text: str) -> str:
    """Return the beginning of a message, in whole words."""
    return textwrap.shorten(text, MAX_REASON_CHARACTERS, placeholder=" ...")


def error_reason(error: Exception) -> str:
    """Return a short description, identical for failures of one kind."""
    match error:
        case RequestError():
            return str(error)
        case httpx2.ConnectError() | httpx2.ConnectTimeout():
            return "no connection"
        case httpx2.TimeoutException() | TimeoutError():
            return "time-out"
        case httpx2.RemoteProtocolError() | httpx2.ReadError():
            return "the connection was lost"
        case _:
            return f"{type(error).__name__}: {shorten_reason(str(error))}"


def normalize_url(url: str) -> str:
    """Return the URL without a trailing slash or `/v1`. Raises UsageError if it is not a server's address."""
    try:
        parts = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.userinfo:
        raise UsageError(f"{url!r} is not a server's address", "use for example http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
