"""Stands before every route: who may ask, what is said to the pages of other origins, and how large and how slow a
body may be. What it refuses reaches no route. Knows nothing of what is asked.
"""

import asyncio
import re
import resource
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.api.anthropic import responses as anthropic
from localllm.api.openai.responses import error_object
from localllm.errors import BodyTooLarge, BodyTooSlow, LocalLLMError, MissingKey, PromptRefused, UsageError
from localllm.protocol.events import error_to_json
from localllm.server.access import PREFLIGHT_MAX_AGE_S, AccessPolicy, Headers, header_values
from localllm.server.request_stats import current_request_stats

# Errors as the API that was asked tells them: which one, its path says.


def error_response(error: LocalLLMError, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """With Retry-After where the error knows when to ask again. The account of the request has it, too,
    unless it is a fault of ours, or may have words of a prompt."""
    account = current_request_stats()
    if account and 400 <= error.http_status < 500 and not isinstance(error, PromptRefused):
        account.error = str(error)
    found = dict(headers or {})
    if after := getattr(error, "retry_after", None):
        found["Retry-After"] = str(after)
    if path.startswith("/v1/messages"):
        found["request-id"] = f"req_{secrets.token_hex(12)}"
        body = anthropic.error_object(error, found["request-id"])
    elif path.startswith("/localllm/"):
        body = error_to_json(error)
    else:
        body = {"error": str(error)} if path.startswith("/api/") else error_object(error)
    return JSONResponse(body, error.http_status, found)


# How long and how much a connection may take, whatever is asked over it.


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = 512
    """At once. Beyond, the one that has idled for longest makes room, and where all are at work the new one gets
    503."""

    head_timeout_s: float = 10.0
    """Within which a request's line and headers come, and before them TLS is agreed upon."""

    max_head_bytes: int = 64 * 2**10

    body_timeout_s: float = 60.0
    """Within which a body comes."""

    body_grace_s: float = 10.0
    min_body_bytes_per_s: float = 16 * 2**10
    """Bytes a second, at least, on the average of a body behind its grace."""

    max_body_bytes: int = 16 * 2**20
    """A context of a million tokens is about 4 MB of text."""

    keep_alive_s: int = 30
    """Of a connection with nothing asked."""

    reader_timeout_s: float = 30.0
    """Within which a client takes `reader_bytes` of what waits for it, or all."""

    min_reader_bytes: int = 16 * 2**10

    def connection_limit(self) -> int:
        """At most half of the files that this process may open: models and answers need some, too."""
        return max(1, min(self.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


PUBLIC_PATHS = re.compile(r"/|/health|/ui|/ui/.*")  # to be read without a key: they tell strangers nothing
UNAUTHENTICATED = "localllm.stranger"  # is set in the scope of those who read them without a key
PAGE_PATHS = re.compile(r"/|/ui/?")  # where links of other pages may lead
UNLIMITED_PATHS = re.compile(r"/api/blobs/[^/]*")  # files, which their route writes as they come
HTTP_VERSIONS = ("1.0", "1.1")
READ_METHODS = ("GET", "HEAD")
CORS_METHODS = b"GET, HEAD, POST, DELETE"
HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")  # names of headers
MAX_HEADER_NAMES_LEN = 1024  # characters of those


class Guard:
    """Middleware."""

    def __init__(self, app: ASGIApp, access: AccessPolicy, limits: ConnectionLimits):
        self.app = app
        self.access = access
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = GuardedBody(
            scope["headers"], receive, send, self.limits, is_limited=not UNLIMITED_PATHS.fullmatch(scope["path"])
        )
        try:
            answer = self.check(scope, body)
        except LocalLLMError as error:
            needs = {"WWW-Authenticate": "Bearer"} if isinstance(error, MissingKey) else {}
            answer = error_response(error, scope["path"], needs)
        await (answer or self.app)(scope, body.receive, body.send)

    def check(self, scope: Scope, body: "GuardedBody") -> Response | None:
        """What to answer where no route is to. Raises LocalLLMError for what is refused."""
        headers, reading = scope["headers"], scope["method"] in READ_METHODS
        if scope["http_version"] not in HTTP_VERSIONS:
            raise UsageError(f"HTTP/{scope['http_version']} is not spoken here", "send HTTP/1.1")
        host = self.access.check_host(headers, scope["client"][0] if scope.get("client") else "")
        is_page = reading and bool(PAGE_PATHS.fullmatch(scope["path"]))
        if self.access.origins or header_values(headers, b"origin"):
            body.cors_headers.append((b"vary", b"Origin"))
        if origin := self.access.check_origin(headers, host, is_page=is_page):
            body.cors_headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (
                    b"access-control-expose-headers",
                    b"Retry-After, X-Request-Id, X-Localllm-Ignored, X-Localllm-Template",
                ),
            ]
            if scope["method"] == "OPTIONS" and header_values(headers, b"access-control-request-method"):
                return preflight_response(headers)  # browsers send no key with it
        body.check_framing()
        try:
            self.access.check_key(headers)
        except MissingKey:
            if not (reading and PUBLIC_PATHS.fullmatch(scope["path"])):
                raise
            scope[UNAUTHENTICATED] = True
        body.check_length()
        return None


def preflight_response(headers: Headers) -> Response:
    """To a browser that asks whether a page, whose origin may ask, may ask this way."""
    found = {
        "Access-Control-Allow-Methods": CORS_METHODS.decode(),
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
    }
    names = ", ".join(header_values(headers, b"access-control-request-headers"))
    if len(names) <= MAX_HEADER_NAMES_LEN and HEADER_NAMES.fullmatch(names):
        found["Access-Control-Allow-Headers"] = names
    return Response(status_code=204, headers=found)


class GuardedBody:
    """Counts a body as it comes, and hangs up on whoever was answered before its end: else the server would go on
    reading a body without end."""

    def __init__(
        self, headers: Headers, receive: Receive, send: Send, limits: ConnectionLimits, *, is_limited: bool
    ):
        """is_limited: how much may come, and how long it may take in all."""
        self.lengths = header_values(headers, b"content-length")
        self.encodings = header_values(headers, b"transfer-encoding")
        self.is_incomplete = bool(self.encodings or set(self.lengths) - {"0"})
        self.limits = limits
        self.is_limited = is_limited
        self.received_bytes = 0
        self.started_at = monotonic()
        self.cors_headers: list[tuple[bytes, bytes]] = []  # headers of the answer, whoever gives it
        self.receive_next, self.send_next = receive, send

    def check_framing(self) -> None:
        """Raises UsageError where two servers in a row could disagree on where the body ends."""
        if self.lengths and self.encodings:
            raise UsageError("a request has both Content-Length and Transfer-Encoding", "send one of them")

    def check_length(self) -> None:
        """Raises TooLarge where the body announces that it is. One that lies is counted."""
        most = self.limits.max_body_bytes
        if self.is_limited and any(one.isdecimal() and int(one[:20]) > most for one in self.lengths):
            raise BodyTooLarge(most)

    async def receive(self) -> Message:
        """Raises TooLarge once more has come than may, and TooSlow where it does not come."""
        if not self.is_incomplete:
            return await self.receive_next()
        allowed = self.deadline_s()
        try:
            async with asyncio.timeout(self.started_at + allowed - monotonic()):
                message = await self.receive_next()
        except TimeoutError:
            what = f"{self.received_bytes:,} bytes of the body came in {allowed:.3g} s"
            raise BodyTooSlow(what, "send it faster, or less") from None
        self.received_bytes += len(message.get("body", b""))
        if self.is_limited and self.received_bytes > self.limits.max_body_bytes:
            raise BodyTooLarge(self.limits.max_body_bytes)
        self.is_incomplete = message.get("more_body", False)
        return message

    def deadline_s(self) -> float:
        """Behind its begin, until which more must have come."""
        whole, so_far = (
            self.limits.body_timeout_s,
            self.limits.body_grace_s + self.received_bytes / self.limits.min_body_bytes_per_s,
        )
        return min(whole, so_far) if self.is_limited else so_far

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (self.is_incomplete or self.cors_headers):
            hang_up = [(b"connection", b"close")] if self.is_incomplete else []
            message = {**message, "headers": [*message["headers"], *self.cors_headers, *hang_up]}
        await self.send_next(message)
