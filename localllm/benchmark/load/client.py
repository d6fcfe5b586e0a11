"""One request over the wire and what became of it. The same client for every server.

It talks to the host it is given and to no other: proxies of the environment and redirects are not followed.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx2

from localllm import __version__
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.benchmark.load.wire import SERVER_APIS, LoadRequest, Message, ServerApi, StreamMessage
from localllm.errors import NetworkError, UsageError

CONNECT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20  # bytes of one message of a stream
MAX_REASON_CHARACTERS = 60  # characters of what a server says went wrong
DONE = "[DONE]"

Clock = Callable[[], float]


class RequestError(Exception):
    """Why a request did not bring an answer."""


class LoadClient:
    """Talks to one server; `async with` closes its connections."""

    def __init__(self, url: str, timeout_s: float, clock: Clock = time.perf_counter):
        """timeout_s: of a whole request. Raises UsageError where `url` is none."""
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
        """The name of the API that it answers: `completions` or `ollama-generate`. Raises NetworkError."""
        if (await self.get_json("/v1/models")) is not None:
            return "completions"
        if (await self.get_json("/api/tags")) is not None:
            return "ollama-generate"
        raise NetworkError(
            f"{self.url} answers neither /v1/models nor /api/tags",
            f"say what it is: --api {'|'.join(SERVER_APIS)}",
        )

    async def first_model(self, wire: ServerApi) -> str:
        """The first model that it lists. Raises NetworkError where it lists none."""
        listing = await self.get_json("/v1/models" if wire.uses_sse else "/api/tags")
        models = (listing or {}).get("data" if wire.uses_sse else "models")
        first = models[0] if isinstance(models, list) and models else None
        name = first.get("id" if wire.uses_sse else "name") if isinstance(first, Mapping) else None
        if not isinstance(name, str):
            raise NetworkError(f"{self.url} lists no model", "name one before --against")
        return name

    async def get_json(self, path: str) -> Message | None:
        """A JSON object, or None where there is none at that path. Raises NetworkError where nobody answers."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.http.get(path)
            found = answer.json() if answer.status_code == httpx2.codes.OK else None
        except (httpx2.HTTPError, TimeoutError) as error:
            raise NetworkError(
                f"{self.url} does not answer ({error_reason(error)})", "check that it runs"
            ) from error
        except ValueError:
            return None
        return found if isinstance(found, Mapping) else None

    async def count_prompt_tokens(self, wire: ServerApi, model: str, prompt: str) -> int | None:
        """How many tokens the server counts in a prompt, by an answer of one token that is not streamed, where
        servers tell usage that they keep from their streams. Raises NetworkError where there is no answer."""
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
        """Send what was to be sent at `arrival` (None: now) and follow the answer. Faults are outcomes."""
        sent = self.clock()
        arrival = sent if arrival is None else arrival
        seen: list[tuple[float, StreamMessage]] = []
        error = None
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.read_stream(wire, wire.make_body(model, ask), seen)
        except (RequestError, httpx2.HTTPError, TimeoutError) as fault:
            error = error_reason(fault)
        return make_outcome(arrival, sent, seen, ask, error)

    async def read_stream(
        self, wire: ServerApi, body: Mapping[str, Any], seen: list[tuple[float, StreamMessage]]
    ) -> None:
        """Note in `seen` when each message came and what it said. Raises Fault where it is no whole answer."""
        async with self.http.stream("POST", wire.path, json=body) as response:
            if response.status_code != httpx2.codes.OK:
                raise RequestError(http_error(response.status_code, await response.aread()))
            async for message in read_sse(response) if wire.uses_sse else read_lines(response):
                at, piece = self.clock(), wire.parse_message(parse_message(message))
                if piece.error is not None:
                    raise RequestError(f"in the stream: {piece.error[:MAX_REASON_CHARACTERS]}")
                seen.append((at, piece))
        if not any(piece.finish_reason for _, piece in seen):
            raise RequestError("the answer broke off")


def make_outcome(
    arrival: float, sent: float, messages: list[tuple[float, StreamMessage]], ask: LoadRequest, error: str | None
) -> RequestOutcome:
    """Of the messages that came, and when."""
    last = next((at for at, piece in messages if piece.finish_reason), float("nan"))
    output = next((p.output_tokens for _, p in reversed(messages) if p.output_tokens is not None), None)
    counted_by = None if output is None else "usage"
    if output is None and any(piece.finish_reason == "length" for _, piece in messages):
        output, counted_by = ask.max_tokens, "limit"
    return RequestOutcome(
        arrival,
        sent,
        tuple(at for at, piece in messages if piece.text),
        last,
        next((p.prompt_tokens for _, p in reversed(messages) if p.prompt_tokens is not None), None),
        output,
        counted_by,
        error,
    )


async def read_sse(response: httpx2.Response) -> AsyncIterator[str]:
    """The data of server-sent events, up to [DONE]."""
    async for event in httpx2.EventSource(response, max_event_size=MAX_MESSAGE_BYTES):
        if event.data == DONE:
            return
        if event.data:  # others only keep the connection alive
            yield event.data


async def read_lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """What stands between line ends. Raises Fault for a line without end."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
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
        raise RequestError("a message is no JSON") from None
    if not isinstance(value, Mapping):
        raise RequestError("a message is no JSON object")
    return value


def http_error(status: int, body: bytes) -> str:
    """`HTTP 400: what the server says of it`."""
    try:
        error = parse_message(body).get("error")
        said = error.get("message") if isinstance(error, Mapping) else error
    except RequestError:
        said = None
    return f"HTTP {status}" + (f": {said[:MAX_REASON_CHARACTERS]}" if isinstance(said, str) else "")


def error_reason(error: Exception) -> str:
    """A few words, the same for faults of one kind."""
    match error:
        case RequestError():
            return str(error)
        case httpx2.ConnectError() | httpx2.ConnectTimeout():
            return "no connection"
        case httpx2.TimeoutException() | TimeoutError():
            return "time-out"
        case httpx2.RemoteProtocolError() | httpx2.ReadError():
            return "the connection broke off"
        case _:
            return f"{type(error).__name__}: {str(error)[:MAX_REASON_CHARACTERS]}"


def normalize_url(url: str) -> str:
    """Without `/v1` and a slash at its end. Raises UsageError where it is no address of a server."""
    try:
        parts = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.userinfo:
        raise UsageError(f"{url!r} is no address of a server", "give for example http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
