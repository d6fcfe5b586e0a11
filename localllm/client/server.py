"""HTTP client of a localllm server: `ServerClient`, and the small HTTP/1.1 implementation below it.

`http.client` takes 15 ms of CPU time to import, for its parsers of mail and TLS, and httpx2 takes 55 ms; this
module takes 2 ms of the start of `localllm run`, which the time to first token of a warm server includes.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from localllm.api.events import SERVER_NAME, error_from_json
from localllm.client.background import find_server
from localllm.errors import (
    AccessDenied,
    LocalLLMError,
    NotLocalLLMServer,
    ServerTooSlow,
    ServerUnreachable,
    UsageError,
)
from localllm.settings import Settings

DEFAULT_PORT = 11434
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 30.0  # from an accepted connection on: a loaded server may take seconds to answer
START_REMEDY = "start one with `localllm serve`, or name it: LOCALLLM_HOST, --server"
RETRY_PAUSES_S = (0.0, 0.05, 0.25)  # before requests to a server that ended before it answered, and was replaced
MAX_LINE_BYTES = 2**16  # of a header line
MAX_HEADERS = 200

JsonObject = dict[str, Any]
T = TypeVar("T")


class ServerClient:
    """A pool of connections to one server. Every request and stream has a connection of its own until it ends.
    `close` aborts all of them, which cancels their answers on the server."""

    def __init__(self, address: str | None = None):
        """address: as for `parse_address`; None for LOCALLLM_HOST, or without it this user's background server,
        or without one the default port. Raises UsageError for a malformed address."""
        settings = Settings.from_environment()
        address = address or settings.host
        if not address and (server := find_server(settings.home)):
            address = server.url
        self.url = parse_address(address or f"127.0.0.1:{DEFAULT_PORT}")
        self.locate: Callable[[], str] | None = None
        """Returns the server's URL before each request, for a server that may be replaced meanwhile: requests that
        it has not answered when it ends are sent again."""
        self.close_count = 0
        self.idle: list[Connection] = []
        self.in_use: list[Connection] = []
        self.headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self.headers["Authorization"] = f"Bearer {settings.api_key}"

    def request_json(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = REPLY_TIMEOUT_S
    ) -> JsonObject:
        """The JSON object of a response. body: None for GET; timeout_s: seconds that the server may take to
        answer, None for no limit.

        Raises ServerUnreachable, NotLocalLLMServer, AccessDenied, and the error that the server returns.
        """
        return self.retry(lambda: self.request_once(path, body, timeout_s))

    def stream_json(self, path: str, body: Mapping[str, Any], *, preface_lines: int = 0) -> "JsonStream":
        """A response with one JSON object per line. preface_lines: lines before the answer, which a second request
        repeats. Raises the errors of `request_json`."""
        return JsonStream(self, path, body, preface_lines)

    def retry(self, request: Callable[[], T]) -> T:
        """The result of a request, which is repeated if a server that can be located ends before it has
        answered."""
        close_count = self.close_count
        for pause_s in RETRY_PAUSES_S if self.locate else ():
            try:
                return request()
            except ServerUnreachable:
                if self.close_count != close_count:  # closed by another thread
                    raise
            time.sleep(pause_s)
        return request()

    def request_once(self, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> JsonObject:
        """Like `request_json`, without a second request."""
        connection = self.take()
        try:
            return parse_json_object(b"".join(self.send(connection, path, body, timeout_s).iter_bytes()), self.url)
        except OSError as error:
            connection.close()
            if timeout_s is not None and isinstance(error, TimeoutError):
                raise self.no_reply(timeout_s) from None
            raise self.connection_lost() from None
        finally:
            self.release(connection)

    def open_stream(self, path: str, body: Mapping[str, Any]) -> "tuple[Connection, Response]":
        """The connection of a response and its beginning. Raises the errors of `request_json`."""
        connection = self.take()
        try:
            return connection, self.send(connection, path, body, None)
        except BaseException:
            self.release(connection)
            raise

    def take(self) -> "Connection":
        """An idle connection, or a new one."""
        if self.locate and (url := parse_address(self.locate())) != self.url:
            for connection in self.idle:
                connection.close()
            self.url, self.idle = url, []
        connection = self.idle.pop() if self.idle else Connection(self.url)
        self.in_use.append(connection)
        return connection

    def release(self, connection: "Connection") -> None:
        """Return a connection that is closed, or whose response was read to the end."""
        if connection in self.in_use:
            self.in_use.remove(connection)
            if connection.url == self.url:  # not of a server that was replaced
                self.idle.append(connection)

    def send(
        self, connection: "Connection", path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> "Response":
        content = b"" if body is None else json.dumps(body).encode()
        method = "POST" if content else "GET"
        try:
            response = connection.request(method, path, self.headers, content, timeout_s)
        except OSError as error:
            if timeout_s is not None and isinstance(error, TimeoutError) and connection.was_accepted:
                raise self.no_reply(timeout_s) from None
            if reason := getattr(error, "verify_message", ""):  # SSLCertVerificationError, without importing ssl
                remedy = "set SSL_CERT_FILE to its certificate or the issuer's"
                raise ServerUnreachable(
                    f"the certificate of {self.url} is not trusted ({reason})", remedy
                ) from None
            reason = error.strerror or str(error) or type(error).__name__
            raise ServerUnreachable(
                f"cannot reach a localllm server at {self.url} ({reason})", START_REMEDY
            ) from None
        if response.status != 200:
            try:
                error = error_from_response(b"".join(response.iter_bytes()), self.url)
            except OSError:
                connection.close()
                raise self.connection_lost() from None
            if response.status == 401 and not isinstance(error, NotLocalLLMServer):
                raise AccessDenied(error.message, "set LOCALLLM_API_KEY to one of its keys")
            raise error
        return response

    def no_reply(self, timeout_s: float) -> ServerTooSlow:
        return ServerTooSlow(
            f"the server at {self.url} accepted the connection and did not answer within {timeout_s:.3g} s",
            "try again, or load the model in this process with `run --local`",
        )

    def connection_lost(self) -> ServerUnreachable:
        return ServerUnreachable(f"the server at {self.url} closed the connection", "see the server's log")

    def close(self) -> None:
        self.close_count += 1
        for connection in (*self.in_use, *self.idle):
            connection.close()


class JsonStream(Iterator[JsonObject]):
    """The lines of one response. Closing it, from any thread, cancels the answer on the server, and leaves other
    requests alone. If the server ends before the first line of the answer, and can be located, the request is sent
    again, once."""

    def __init__(self, server: ServerClient, path: str, body: Mapping[str, Any], preface_lines: int):
        self.server, self.path, self.body, self.preface_lines = server, path, body, preface_lines
        self.line_count, self.is_closed, self.was_repeated = 0, False, False
        self.open()

    def open(self) -> None:
        self.connection, self.response = self.server.retry(lambda: self.server.open_stream(self.path, self.body))
        self.lines = self.response.iter_lines()

    def __next__(self) -> JsonObject:
        close_count = self.server.close_count
        try:
            line = parse_json_object(next(self.lines), self.server.url)
        except StopIteration:
            self.server.release(self.connection)
            raise
        except OSError:
            self.abort()
            is_over = self.is_closed or self.server.close_count != close_count or not self.server.locate
            if is_over or self.was_repeated or self.line_count > self.preface_lines:
                raise self.server.connection_lost() from None
            return self.repeat()
        if "error" in line:
            raise error_from_json(line)
        self.line_count += 1
        return line

    @property
    def has_more(self) -> bool:
        """Whether the next line has been received."""
        return self.response.unread_lines > 0

    def repeat(self) -> JsonObject:
        """Send the request again, and return the line that is due."""
        due, self.line_count, self.was_repeated = self.line_count, 0, True
        self.open()
        if self.is_closed:  # by another thread
            self.abort()
        for _ in range(due):
            next(self)
        return next(self)

    def abort(self) -> None:
        self.connection.close(self.response)
        self.server.release(self.connection)

    def close(self) -> None:
        self.is_closed = True
        self.abort()


def parse_address(address: str) -> str:
    """URL with a port of `host`, `host:port`, `http://host:port` or `https://...`. Raises UsageError."""
    url = address if "://" in address else f"http://{address}"
    remedy = "give HOST:PORT or http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{address!r} is not a server address", remedy) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UsageError(f"{address!r} is not a server address", remedy)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # a server on all addresses is here, too
    return f"{parts.scheme}://{host}:{DEFAULT_PORT if port is None else port}"


def parse_json_object(text: bytes, url: str) -> JsonObject:
    """Raises NotLocalLLMServer for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise not_localllm(url)
    return value


def error_from_response(content: bytes, url: str) -> LocalLLMError:
    """The error of a response body; NotLocalLLMServer if it is not in localllm's format."""
    body = parse_json_object(content, url)
    error = body.get("error")
    return error_from_json(body) if isinstance(error, dict) and "kind" in error else not_localllm(url)


def check_server_name(body: JsonObject, url: str) -> JsonObject:
    """The body, which must name localllm as the server. Raises NotLocalLLMServer."""
    if body.get("server") != SERVER_NAME:
        raise not_localllm(url)
    return body


def not_localllm(url: str) -> NotLocalLLMServer:
    return NotLocalLLMServer(f"the server at {url} is not localllm", START_REMEDY)


class ProtocolError(OSError):
    """The response is not HTTP, or incomplete."""


class Connection:
    """A keep-alive connection, opened by the first request."""

    def __init__(self, url: str):
        """url: of `parse_address`"""
        parts = urlsplit(url)
        self.url = url
        self.host, self.port, self.tls = parts.hostname or "", parts.port or DEFAULT_PORT, parts.scheme == "https"
        self.socket: socket.socket | None = None
        self.was_accepted = False  # the newest request had a connection
        self.response: Response | None = None  # its file keeps the socket open as well

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float | None
    ) -> "Response":
        """Send a request and read the response's head. timeout_s: of each socket operation after
        connecting, None for no limit.

        Raises OSError. A connection that the server has closed since the last request is opened again.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        content = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        is_reused = self.socket is not None
        try:
            return self.send_request(content, timeout_s)
        except (ProtocolError, ConnectionError):
            if not is_reused:
                raise
        return self.send_request(content, timeout_s)

    def send_request(self, content: bytes, timeout_s: float | None) -> "Response":
        try:
            if self.socket is None:
                self.was_accepted = False
                self.socket = self.connect(timeout_s)
            self.was_accepted = True
            self.socket.settimeout(timeout_s)
            self.socket.sendall(content)
            self.response = Response(self.socket)
            self.response.read_head()
            return self.response
        except BaseException:
            self.close()
            raise

    def connect(self, timeout_s: float | None) -> socket.socket:
        # As bytes, since a str makes `socket` import the idna codec.
        host: Any = self.host.encode() if self.host.isascii() else self.host
        connect_timeout_s = None if timeout_s is None else min(timeout_s, CONNECT_TIMEOUT_S)
        connected = socket.create_connection((host, self.port), connect_timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.tls:
            return connected
        import ssl

        return ssl.create_default_context().wrap_socket(connected, server_hostname=self.host)

    def close(self, only_if: "Response | None" = None) -> None:
        """Close, from any thread; a reader gets ProtocolError. only_if: unless a newer response has begun."""
        response, connected = self.response, self.socket
        if only_if is not None and only_if is not response:
            return
        self.response = self.socket = None
        if connected:
            with suppress(OSError):  # it has ended already
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not SSLSocket's, which is not thread-safe
        if response:
            response.file.close()  # waits for a reader in another thread
        if connected:
            connected.close()


class Response:
    """A response: `read_head`, then `iter_bytes` or `iter_lines`. All raise ProtocolError if it is malformed."""

    def __init__(self, source: socket.socket):
        self.file = source.makefile("rb")
        self.status = 0
        self.headers: dict[str, str] = {}
        self.unread_lines = 0  # that `iter_lines` has received

    def read_head(self) -> None:
        try:
            words = self.read_line().split(None, 2)
            self.status = int(words[1]) if words[0].startswith(b"HTTP/1.") else 0
        except (IndexError, ValueError):
            self.status = 0
        if not 100 <= self.status < 600:
            raise ProtocolError("not an HTTP response")
        while line := self.read_line():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
            if len(self.headers) > MAX_HEADERS:
                raise ProtocolError("too many headers")

    def read_line(self) -> bytes:
        line = self.file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ProtocolError("the response is incomplete")
        return line.rstrip(b"\r\n")

    def iter_bytes(self) -> Iterator[bytes]:
        """The body as it arrives. Raises OSError, and ValueError if the connection was closed meanwhile."""
        with self.file:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                yield self.read_exactly(self.parse_length(self.headers.get("content-length", "0"), 10))
                return
            while size := self.parse_length(self.read_line().split(b";")[0].decode("latin-1"), 16):
                yield self.read_exactly(size)
                self.read_line()
            while self.read_line():
                pass

    def iter_lines(self) -> Iterator[bytes]:
        """The body line by line."""
        rest = b""
        for content in self.iter_bytes():
            *lines, rest = (rest + content).split(b"\n")
            for self.unread_lines in range(len(lines) - 1, -1, -1):
                yield lines[-1 - self.unread_lines]
        if rest:
            yield rest

    def read_exactly(self, size: int) -> bytes:
        if len(content := self.file.read(size)) < size:
            raise ProtocolError("the response is incomplete")
        return content

    def parse_length(self, digits: str, base: int) -> int:
        try:
            size = int(digits, base)
        except ValueError:
            size = -1
        if not 0 <= size < 2**30:
            raise ProtocolError("not an HTTP response")
        return size
