"""Middleware before every route: access control, CORS, and limits on the size and speed of bodies.

Also the error responses, in the format of the API that the path belongs to.
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
from localllm.api.events import error_to_json
from localllm.api.openai.responses import error_object
from localllm.errors import BodyTooLarge, BodyTooSlow, LocalLLMError, MissingKey, PromptRefused, UsageError
from localllm.request import CACHE_SCOPE, CLIENT
from localllm.server.access import PREFLIGHT_MAX_AGE_S, AccessPolicy, Headers, header_values, key_scope
from localllm.server.request_stats import current_request_stats

PUBLIC_PATHS = re.compile(r"/|/health|/ui|/ui/.*|/simulate")  # readable without a key; they reveal nothing
UNAUTHENTICATED = "localllm.unauthenticated"  # set in the scope of requests without a key to these paths
KEY = "localllm.key"  # the digest of a request's key, None without one, in the scope of each admitted request
PAGE_PATHS = re.compile(r"/|/ui/?|/simulate")  # which other sites may link to
UNLIMITED_PATHS = re.compile(r"/api/blobs/[^/]*|/localllm/state")  # bodies that their routes limit and never hold
HTTP_VERSIONS = ("1.0", "1.1")
READ_METHODS = ("GET", "HEAD")
CORS_METHODS = "GET, HEAD, POST, DELETE"
CORS_EXPOSED = b"Retry-After, X-Request-Id, X-Localllm-Ignored, X-Localllm-Template"
HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
MAX_HEADER_NAMES_LEN = 1024  # characters


def error_response(error: LocalLLMError, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Response of an error, in the format of the API that the path belongs to.

    Client errors are also recorded for the request log, except those that may quote the prompt.
    """
    stats = current_request_stats()
    if stats and 400 <= error.http_status < 500 and not isinstance(error, PromptRefused):
        stats.error = str(error)
    response_headers = dict(headers or {})
    if retry_after := getattr(error, "retry_after", None):
        response_headers["Retry-After"] = str(retry_after)
    if path.startswith("/v1/messages"):
        response_headers["request-id"] = f"req_{secrets.token_hex(12)}"
        body = anthropic.error_object(error, response_headers["request-id"])
    elif path.startswith("/localllm/"):
        body = error_to_json(error)
    else:
        body = {"error": str(error)} if path.startswith("/api/") else error_object(error)
    return JSONResponse(body, error.http_status, response_headers)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of time and size for one connection, and on the number of connections."""

    max_connections: int = 512
    """Open connections. Beyond that the longest idle one is closed, or, if none is idle, the new one gets 503."""

    head_timeout_s: float = 10.0
    """Time for the request line and headers, and before them for the TLS handshake."""

    max_head_bytes: int = 64 * 2**10

    body_timeout_s: float = 60.0
    """Time for the whole body."""

    body_grace_s: float = 10.0
    min_body_bytes_per_s: float = 16 * 2**10
    """Minimum average speed of a body after `body_grace_s`."""

    max_body_bytes: int = 16 * 2**20
    """A million tokens are about 4 MB of text."""

    keep_alive_s: int = 30
    """Seconds until an idle connection is closed."""

    reader_timeout_s: float = 30.0
    """Time in which a client must read `min_reader_bytes` of the pending output, or all of it."""

    min_reader_bytes: int = 16 * 2**10

    def connection_limit(self) -> int:
        """The limit on connections, at most half of the files that this process may open."""
        return max(1, min(self.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class Guard:
    """Middleware that refuses requests before they reach a route."""

    def __init__(self, app: ASGIApp, access: AccessPolicy, limits: ConnectionLimits):
        self.app = app
        self.access = access
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = GuardedBody(
            scope["headers"],
            receive,
            send,
            self.limits,
            is_limited=scope["method"] != "POST" or not UNLIMITED_PATHS.fullmatch(scope["path"]),
        )
        try:
            response = self.check(scope, body)
        except LocalLLMError as error:
            challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, MissingKey) else {}
            response = error_response(error, scope["path"], challenge)
        await (response or self.app)(scope, body.receive, body.send)

    def check(self, scope: Scope, body: "GuardedBody") -> Response | None:
        """Response of a CORS preflight; None for a request that goes to its route. Raises LocalLLMError for a
        request that is refused."""
        headers, reading = scope["headers"], scope["method"] in READ_METHODS
        if self.access.is_behind_front:
            self.admit(scope, scope[KEY])
            return None
        if scope["http_version"] not in HTTP_VERSIONS:
            raise UsageError(f"HTTP/{scope['http_version']} is not supported", "send HTTP/1.1")
        host = self.access.check_host(headers, scope["client"][0] if scope.get("client") else "")
        is_page = reading and bool(PAGE_PATHS.fullmatch(scope["path"]))
        if self.access.origins or header_values(headers, b"origin"):
            body.cors_headers.append((b"vary", b"Origin"))
        if origin := self.access.check_origin(headers, host, is_page=is_page):
            body.cors_headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", CORS_EXPOSED),
            ]
            if scope["method"] == "OPTIONS" and header_values(headers, b"access-control-request-method"):
                return preflight_response(headers)  # browsers send no key with a preflight
        body.check_framing()
        try:
            self.admit(scope, self.access.check_key(headers))
        except MissingKey:
            if not (reading and PUBLIC_PATHS.fullmatch(scope["path"])):
                raise
            scope[UNAUTHENTICATED], scope[KEY] = True, None
        body.check_length()
        return None

    def admit(self, scope: Scope, key: bytes | None) -> None:
        """Serve a request for the client with this key. key: its digest, None without one"""
        scope[KEY] = key
        if UNAUTHENTICATED in scope:
            return
        CLIENT.set(key_scope(key))
        CACHE_SCOPE.set(self.access.cache_scope(key))
        if stats := current_request_stats():
            stats.key = self.access.key_label(key)


def preflight_response(headers: Headers) -> Response:
    """Response of a CORS preflight from an accepted origin."""
    allowed = {
        "Access-Control-Allow-Methods": CORS_METHODS,
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
    }
    names = ", ".join(header_values(headers, b"access-control-request-headers"))
    if len(names) <= MAX_HEADER_NAMES_LEN and HEADER_NAMES.fullmatch(names):
        allowed["Access-Control-Allow-Headers"] = names
    return Response(status_code=204, headers=allowed)


class GuardedBody:
    """Applies the limits to a body while it arrives, and closes the connection if the response starts before the
    body has ended, as the server would continue to read it."""

    def __init__(
        self, headers: Headers, receive: Receive, send: Send, limits: ConnectionLimits, *, is_limited: bool
    ):
        """is_limited: whether `max_body_bytes` and `body_timeout_s` apply."""
        self.lengths = header_values(headers, b"content-length")
        self.encodings = header_values(headers, b"transfer-encoding")
        self.is_incomplete = bool(self.encodings or set(self.lengths) - {"0"})
        self.limits = limits
        self.is_limited = is_limited
        self.received_bytes = 0
        self.started_at = monotonic()
        self.cors_headers: list[tuple[bytes, bytes]] = []  # added to the response
        self.receive_next, self.send_next = receive, send

    def check_framing(self) -> None:
        """Raises UsageError if a proxy and this server could disagree on where the body ends."""
        if self.lengths and self.encodings:
            raise UsageError("a request has both Content-Length and Transfer-Encoding", "send one of them")

    def check_length(self) -> None:
        """Raises BodyTooLarge by the announced length; `receive` counts the actual one."""
        limit = self.limits.max_body_bytes
        if self.is_limited and any(each.isdecimal() and int(each[:20]) > limit for each in self.lengths):
            raise BodyTooLarge(limit)

    async def receive(self) -> Message:
        """Raises BodyTooLarge and BodyTooSlow."""
        if not self.is_incomplete:
            return await self.receive_next()
        allowed = self.deadline_s()
        try:
            async with asyncio.timeout(self.started_at + allowed - monotonic()):
                message = await self.receive_next()
        except TimeoutError:
            message = f"{self.received_bytes:,} bytes of the body arrived in {allowed:.3g} s"
            raise BodyTooSlow(message, "send it faster, or send less") from None
        self.received_bytes += len(message.get("body", b""))
        if self.is_limited and self.received_bytes > self.limits.max_body_bytes:
            raise BodyTooLarge(self.limits.max_body_bytes)
        self.is_incomplete = message.get("more_body", False)
        return message

    def deadline_s(self) -> float:
        """Seconds after the start of the body by which more of it must have arrived."""
        deadline = self.limits.body_grace_s + self.received_bytes / self.limits.min_body_bytes_per_s
        return min(self.limits.body_timeout_s, deadline) if self.is_limited else deadline

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (self.is_incomplete or self.cors_headers):
            close = [(b"connection", b"close")] if self.is_incomplete else []
            message = {**message, "headers": [*message["headers"], *self.cors_headers, *close]}
        await self.send_next(message)
