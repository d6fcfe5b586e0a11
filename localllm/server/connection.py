"""HTTP connections: uvicorn's protocol with timeouts, a connection limit, and errors in the API's format.

uvicorn alone waits forever for headers and for clients that do not read, and accepts any number of connections.
"""

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalLLMError, MalformedRequest
from localllm.server.guard import ConnectionLimits, error_response

TOO_MANY_CONNECTIONS = {"error": "too many connections are open; try again later"}


class Connection(H11Protocol):
    def __init__(self, limits: ConnectionLimits, idle: "dict[Connection, None]", **rest: Any):
        """idle: the server's connections without a request, longest idle first; rest: uvicorn's arguments."""
        super().__init__(**rest)
        self.limits = limits
        self.idle = idle
        self.max_connections = limits.connection_limit()
        self.head_timer: asyncio.TimerHandle | None = None
        self.reader_timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Pause as soon as the kernel accepts no more, so that `check_reader` sees all unsent bytes.
        transport.set_write_buffer_limits(high=1, low=0)
        self.mark_idle()
        self.start_head_timer()
        if len(self.connections) <= self.max_connections:
            return
        longest_idle = next(iter(self.idle))
        if longest_idle is self:
            self.refuse_connection()
        else:
            longest_idle.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self.cancel_head_timer()
        self.reader_timer = cancel_timer(self.reader_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.is_busy:
            self.start_head_timer()
        super().data_received(data)
        if self.is_busy:
            self.idle.pop(self, None)
            self.cancel_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_busy:
            self.mark_idle()

    def mark_idle(self) -> None:
        self.idle.pop(self, None)  # moves it to the end
        self.idle[self] = None

    def start_head_timer(self) -> None:
        """Start the timeout of the headers, if it is not running: further bytes do not extend it."""
        if not self.head_timer:
            self.head_timer = self.loop.call_later(self.limits.head_timeout_s, self.head_timed_out)

    def cancel_head_timer(self) -> None:
        self.head_timer = cancel_timer(self.head_timer)

    def head_timed_out(self) -> None:
        if self.conn.trailing_data[0]:
            message = f"the request headers did not arrive within {self.limits.head_timeout_s:.3g} s"
            self.refuse(MalformedRequest(message, 408))
        else:
            self.hang_up()

    def send_400_response(self, msg: str) -> None:
        """Override of uvicorn's, which calls it while it handles h11's error: respond with that error's status."""
        fault = sys.exc_info()[1]
        status = getattr(fault, "error_status_hint", 400)
        self.refuse(MalformedRequest(f"malformed HTTP request ({fault})"[:200], status))

    def refuse(self, error: LocalLLMError) -> None:
        """Send an error and close. If a response has started, only close."""
        if self.is_busy and self.cycle.response_started:
            self.transport.abort()
            return
        answer = error_response(error, self.scope["path"] if self.is_busy else "/", {"Connection": "close"})
        head = h11.Response(status_code=answer.status_code, headers=answer.raw_headers)
        parts = (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.hang_up()

    def refuse_connection(self) -> None:
        """Send 503 before the request is read, and therefore in a format of no particular API."""
        body = json.dumps(TOO_MANY_CONNECTIONS).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.hang_up()

    def hang_up(self) -> None:
        """Close once all output is sent; `check_reader` handles clients that do not read it."""
        self.idle.pop(self, None)
        self.cancel_head_timer()
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_reader_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.reader_timer = cancel_timer(self.reader_timer)

    def start_reader_timer(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self.reader_timer = self.loop.call_later(self.limits.reader_timeout_s, self.check_reader, unsent)

    def check_reader(self, unsent: int) -> None:
        """Abort the connection, and so its answer, if the client has read almost none of `unsent` bytes."""
        if unsent - self.transport.get_write_buffer_size() < self.limits.min_reader_bytes:
            self.transport.abort()
        else:
            self.start_reader_timer()


def cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
