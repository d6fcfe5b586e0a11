"""As much of HTTP/1.1 as asking a server takes. `http.client` would do, and take a third of the time in which the
first token is to be here: it imports the parsers of mail and TLS.

Answers are read as they come, in chunks, by their length or up to the end. What a server sends is bounded.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

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
