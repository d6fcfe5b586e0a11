"""Who may ask: the Host and the Origin of each request, and the size of its body. Stands before every route.

A page of the web can make its visitor's browser send requests to this machine. Under its own name that it points
here (DNS rebinding), Host names a stranger; across origins, Origin does. Both are refused, and as no answer
carries CORS headers, no other origin may read any. Knows nothing of what is asked.
"""

import ipaddress
import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.server.refusals import answer_of

MOST_BODY = 16 * 2**20  # bytes; a context of a million tokens is about 4 MB of text
HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(:\d{1,5})?")


class Refused(LocalLLMError):
    """A request that names another host or comes from a page of another origin."""

    http_status = 403


class TooLarge(LocalLLMError):
    """A body over the limit."""

    http_status = 413

    def __init__(self) -> None:
        super().__init__(f"the body is larger than {MOST_BODY // 2**20} MiB", "send a smaller one")


class Guard:
    """Middleware: what it refuses reaches no route."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = Body(scope["headers"], receive, send)
        try:
            check_names(scope["headers"])
            body.check_length()
        except LocalLLMError as error:
            await answer_of(error, scope["path"])(scope, body.receive, body.send)
            return
        await self.app(scope, body.receive, body.send)


class Body:
    """Counts a body as it comes, and hangs up on whoever was answered before its end: else the server would go on
    reading a body without end."""

    def __init__(self, headers: Sequence[tuple[bytes, bytes]], receive: Receive, send: Send):
        self.lengths = every(headers, b"content-length")
        self.under_way = bool(self.lengths or every(headers, b"transfer-encoding"))
        self.come = 0
        self.receive_next, self.send_next = receive, send

    def check_length(self) -> None:
        """Raises TooLarge where the body announces that it is. One that lies is counted."""
        if any(length.isdecimal() and int(length[:20]) > MOST_BODY for length in self.lengths):
            raise TooLarge

    async def receive(self) -> Message:
        """Raises TooLarge once more has come than may."""
        message = await self.receive_next()
        self.come += len(message.get("body", b""))
        if self.come > MOST_BODY:
            raise TooLarge
        self.under_way = self.under_way and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self.under_way:
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self.send_next(message)


def check_names(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises Refused where Host is not this machine's own, or Origin not that of the same address."""
    hosts, origins = every(headers, b"host"), every(headers, b"origin")
    if len(hosts) != 1 or not is_loopback(hosts[0]):
        raise Refused(f"the Host header is {', '.join(hosts) or 'missing'}", "ask as localhost or 127.0.0.1")
    if any(origin != f"http://{hosts[0]}" for origin in origins):
        raise Refused(f"a page of {', '.join(origins)} may not ask here", "ask from a program, not a web page")


def is_loopback(host: str) -> bool:
    """Does a Host header, with its port or without, name this machine in a way that asks no name server?"""
    found = HOST.fullmatch(host)
    name = found["name"].strip("[]").lower() if found else ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def every(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[str]:
    """The values of a header, whose name is in small letters as ASGI has it."""
    return [value.decode("latin-1") for key, value in headers if key == name]
