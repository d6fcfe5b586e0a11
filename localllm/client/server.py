"""A server of localllm as its own client sees it: where it is, whether it is one, what it is asked over HTTP.

Imports little: the time until the first token counts from the start of the process.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from localllm.client.http import Connection, Response
from localllm.errors import AccessDenied, LocalLLMError, NotLocalLLMServer, ServerUnreachable, UsageError
from localllm.protocol.events import SERVER_NAME, error_from_json
from localllm.settings import Settings

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
