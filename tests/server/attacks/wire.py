"""Raw requests, byte by byte."""

import json
import socket
import ssl
import time
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from localllm import LLM
from localllm.server.access import AccessPolicy, make_access_policy

READER_S = 1.0
PATIENCE_S = 60  # in which even a busy machine answers
KEY = "correct-horse-battery-staple"
COMPLETION = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
BODY = json.dumps(COMPLETION).encode()
LONG = {"max_tokens": 1000, "logprobs": 20, "stream": True}  # more than the system keeps for who does not read


class Response(NamedTuple):
    status: int
    headers: dict[str, str]  # names in small letters
    body: bytes

    @property
    def message(self) -> str:
        """Error message, in the format of any of the APIs."""
        error = json.loads(self.body)["error"]
        return error if isinstance(error, str) else error["message"]


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S)


def connect_narrow(url: str) -> socket.socket:
    """Connect with a small receive buffer, so that the server blocks soon if the client does not read."""
    parts = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    connection.connect((parts.hostname or "", parts.port or 0))
    return connection


def read_response(connection: socket.socket, method: str = "GET") -> Response:
    """Read one response. Raises the errors of `http.client` and sockets."""
    answer = HTTPResponse(connection, method=method)
    answer.begin()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    return Response(answer.status, headers, answer.read())


def exchange(url: str, sent: bytes, method: str = "GET") -> Response:
    with connect(url) as connection:
        connection.sendall(sent)
        return read_response(connection, method)


def request(
    method: str = "POST", path: str = "/v1/completions", *lines: str, host: str = "localhost", body: bytes = BODY
) -> bytes:
    """Bytes of a request, with a Content-Length if it has a body; `lines`: further headers."""
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", *lines]
    head += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def completion_request(*lines: str, **changes: Any) -> bytes:
    return request("POST", "/v1/completions", *lines, body=json.dumps(COMPLETION | changes).encode())


def wait_until_idle(llm: LLM) -> None:
    """Wait until no answer is running, and then longer than a client may stop reading."""
    while llm.worker.outputs:
        time.sleep(0.05)
    time.sleep(2 * READER_S + 0.5)


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes the connection. Raises TimeoutError if it does not."""
    came = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            came += piece
    return came


def public_policy(
    *, keys: tuple[str, ...] = (KEY,), tls: ssl.SSLContext | None = None, **flags: Any
) -> AccessPolicy:
    """Access policy of a server that accepts other machines, used by one that listens on loopback."""
    return make_access_policy("0.0.0.0", keys, tls=tls, **flags)
