"""A server of localllm as its own client sees it: where it is, whether it is one, what it is asked over HTTP.

Imports little: the time until the first token counts from the start of the process.
"""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from localllm.errors import AccessDenied, LocalLLMError, NotLocalLLMServer, ServerUnreachable, UsageError
from localllm.protocol.events import SERVER_NAME, error_from_json
from localllm.settings import Settings

# As much of HTTP/1.1 as asking a server takes. `http.client` would do, and take a third of the time in which the
# first token is to be here: it imports the parsers of mail and TLS.
#
# Answers are read as they come, in chunks, by their length or up to the end. What a server sends is bounded.

MAX_LINE_BYTES = 2**16  # bytes of a line of the head
MAX_HEADERS = 200


class ProtocolError(OSError):
    """The other side speaks no HTTP, or stopped in the middle."""


class Connection:
    """One connection, opened when it is needed and kept."""

    def __init__(self, host: str, port: int, *, tls: bool = False):
        self.host, self.port, self.tls = host, port, tls
        self.socket: socket.socket | None = None
        self.response: Response | None = None  # whose file holds the socket open, too

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float | None
    ) -> "Response":
        """timeout_s: seconds without a sign of the server, None for as long as it takes. Raises OSError."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        asked = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        kept = self.socket
        try:
            return self.send_request(asked, timeout_s)
        except (ProtocolError, ConnectionError):
            if kept is None:
                raise
        return self.send_request(asked, timeout_s)  # the server had closed what was kept

    def send_request(self, content: bytes, timeout_s: float | None) -> "Response":
        try:
            if self.socket is None:
                self.socket = self.connect(timeout_s)
            self.socket.settimeout(timeout_s)
            self.socket.sendall(content)
            self.response = Response(self.socket)
            self.response.read_head()
            return self.response
        except BaseException:
            self.close()
            raise

    def connect(self, timeout_s: float | None) -> socket.socket:
        # In bytes, as the codec of names beyond ASCII is imported for any text.
        host: Any = self.host.encode() if self.host.isascii() else self.host
        made = socket.create_connection((host, self.port), timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.tls:
            return made
        import ssl

        return ssl.create_default_context().wrap_socket(made, server_hostname=self.host)

    def close(self, only_if: "Response | None" = None) -> None:
        """From any thread: whoever reads an answer finds it broken off. only_if: only while this is the newest."""
        answer, kept = self.response, self.socket
        if only_if is not None and only_if is not answer:
            return
        self.response = self.socket = None
        if kept:
            with suppress(OSError):  # that it has ended already
                socket.socket.shutdown(kept, socket.SHUT_RDWR)  # not TLS's, which who reads is amid
        if answer:
            answer.file.close()  # waits for who reads from it
        if kept:
            kept.close()


class Response:
    """What came back: `read_head`, then `pieces` or `lines`. All raise Broken where it is no answer."""

    def __init__(self, source: socket.socket):
        self.file = source.makefile("rb")
        self.status = 0
        self.headers: dict[str, str] = {}

    def read_head(self) -> None:
        try:
            words = self.read_line().split(None, 2)
            self.status = int(words[1]) if words[0].startswith(b"HTTP/1.") else 0
        except (IndexError, ValueError):
            self.status = 0
        if not 100 <= self.status < 600:
            raise ProtocolError("no answer of HTTP")
        while line := self.read_line():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
            if len(self.headers) > MAX_HEADERS:
                raise ProtocolError("too many headers")

    def read_line(self) -> bytes:
        line = self.file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ProtocolError("the server broke off")
        return line.rstrip(b"\r\n")

    def iter_bytes(self) -> Iterator[bytes]:
        """The body as it comes. Raises Broken where it ends before its end, OSError, and ValueError where it was
        closed."""
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
        """The body, a line at a time."""
        rest = b""
        for piece in self.iter_bytes():
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
        if rest:
            yield rest

    def read_exactly(self, size: int) -> bytes:
        if len(piece := self.file.read(size)) < size:
            raise ProtocolError("the server broke off")
        return piece

    def parse_length(self, digits: str, base: int) -> int:
        try:
            size = int(digits, base)
        except ValueError:
            size = -1
        if not 0 <= size < 2**30:
            raise ProtocolError("no answer of HTTP")
        return size


DEFAULT_PORT = 11434
HANDSHAKE_TIMEOUT_S = 2.0  # for a server to say what it is

START_REMEDY = "start one with `localllm serve`, or name it: LOCALLLM_HOST, --server"

JsonObject = dict[str, Any]


class ServerClient:
    """Connections to one server, kept from question to question. Each question and each stream has one of its own
    while it is under way, so that a stream stands in nobody's way. `close` breaks off all, also at the server."""

    def __init__(self, address: str | None = None):
        """address: as LOCALLLM_HOST, which is asked for it where it is None. Raises UsageError for no address."""
        settings = Settings.from_environment()
        self.url = parse_address(address or settings.host or f"127.0.0.1:{DEFAULT_PORT}")
        self.idle: list[Connection] = []
        self.in_use: list[Connection] = []
        self.headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self.headers["Authorization"] = f"Bearer {settings.api_key}"

    def request_json(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = HANDSHAKE_TIMEOUT_S
    ) -> JsonObject:
        """The JSON object that it answers with. Raises NoServer, OtherServer, and what the server says.

        body: None to get; timeout_s: seconds, None to wait as long as it takes.
        """
        connection = self.take()
        try:
            return parse_json_object(b"".join(self.send(connection, path, body, timeout_s).iter_bytes()), self.url)
        except OSError:
            connection.close()
            raise self.broken_off() from None
        finally:
            self.release(connection)

    def stream_json(self, path: str, body: Mapping[str, Any]) -> "JsonStream":
        """One JSON object a line, as they come. Raises as `request_json`."""
        connection = self.take()
        try:
            return JsonStream(self, connection, self.send(connection, path, body, None))
        except BaseException:
            self.release(connection)
            raise

    def take(self) -> Connection:
        """One that nobody uses."""
        parts = urlsplit(self.url)
        host, port, tls = parts.hostname or "", parts.port or DEFAULT_PORT, parts.scheme == "https"
        connection = self.idle.pop() if self.idle else Connection(host, port, tls=tls)
        self.in_use.append(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Give one back; closed, or at the end of its answer."""
        if connection in self.in_use:
            self.in_use.remove(connection)
            self.idle.append(connection)

    def send(
        self, connection: Connection, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Response:
        content = b"" if body is None else json.dumps(body).encode()
        try:
            answer = connection.request("POST" if content else "GET", path, self.headers, content, timeout_s)
        except OSError as error:
            if unproven := getattr(error, "verify_message", ""):  # of ssl's, which is not imported for its name
                remedy = "name its certificate, or whose signed it, in SSL_CERT_FILE"
                raise ServerUnreachable(
                    f"the certificate of {self.url} is not trusted ({unproven})", remedy
                ) from None
            why = error.strerror or str(error) or type(error).__name__
            raise ServerUnreachable(f"no server of localllm answers at {self.url} ({why})", START_REMEDY) from None
        if answer.status != 200:
            try:
                error = error_from_response(b"".join(answer.iter_bytes()), self.url)
            except OSError:
                connection.close()
                raise self.broken_off() from None
            if answer.status == 401 and not isinstance(error, NotLocalLLMServer):
                raise AccessDenied(error.message, "give one of its keys in LOCALLLM_API_KEY")
            raise error
        return answer

    def broken_off(self) -> ServerUnreachable:
        return ServerUnreachable(f"the server at {self.url} broke off its answer", "its log may say why")

    def close(self) -> None:
        for connection in (*self.in_use, *self.idle):
            connection.close()


class JsonStream(Iterator[JsonObject]):
    """The lines of one answer, on a connection of its own until its end. Closing it, from any thread, breaks it
    off, also at the server, and nothing else."""

    def __init__(self, server: ServerClient, connection: Connection, answer: Response):
        self.server, self.connection, self.answer = server, connection, answer
        self.lines = answer.iter_lines()

    def __next__(self) -> JsonObject:
        try:
            found = parse_json_object(next(self.lines), self.server.url)
        except StopIteration:
            self.server.release(self.connection)
            raise
        except OSError:
            self.close()
            raise self.server.broken_off() from None
        if "error" in found:
            raise error_from_json(found)
        return found

    def close(self) -> None:
        self.connection.close(self.answer)
        self.server.release(self.connection)


def parse_address(address: str) -> str:
    """`host`, `host:port`, `http://host:port` and `https://...` as a URL with a port. Raises UsageError."""
    url = address if "://" in address else f"http://{address}"
    remedy = "give HOST:PORT or http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{address!r} is no address of a server", remedy) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UsageError(f"{address!r} is no address of a server", remedy)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    # Who listens everywhere is asked here.
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"{parts.scheme}://{host}:{DEFAULT_PORT if port is None else port}"


def parse_json_object(text: bytes, url: str) -> JsonObject:
    """Raises OtherServer where that is no JSON object, as something else answers."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NotLocalLLMServer(f"what answers at {url} is not localllm", START_REMEDY)
    return found


def error_from_response(content: bytes, url: str) -> LocalLLMError:
    """What to raise for an answer that refuses: the server's own error, if it is one of localllm's."""
    found = parse_json_object(content, url)
    error = found.get("error")
    if not isinstance(error, dict) or "kind" not in error:
        return NotLocalLLMServer(f"what answers at {url} is not localllm", START_REMEDY)
    return error_from_json(found)


def check_server_name(body: JsonObject, url: str) -> JsonObject:
    """What a server says of itself. Raises OtherServer where it is not localllm."""
    if body.get("server") != SERVER_NAME:
        raise NotLocalLLMServer(f"what answers at {url} is not localllm", START_REMEDY)
    return body
