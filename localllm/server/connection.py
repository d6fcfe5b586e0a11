"""One connection: uvicorn's, with an end to everything that a client can drag out, and errors in our own words.

uvicorn waits for ever for a request's headers and for whoever does not read, and takes any number of connections.
Knows nothing of what is asked.
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
        """idle: those of the server's connections that ask nothing, the longest idle first; rest: uvicorn's."""
        super().__init__(**rest)
        self.limits = limits
        self.idle = idle
        self.max_connections = limits.connection_limit()
        self.head_timer: asyncio.TimerHandle | None = None
        self.reader_timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """A request is here that has no whole answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Pauses as soon as the system takes no more, so that `stalled` sees whatever waits.
        transport.set_write_buffer_limits(high=1, low=0)
        self.mark_idle()
        self.start_head_timer()
        if len(self.connections) <= self.max_connections:
            return
        longest = next(iter(self.idle))
        if longest is self:
            self.refuse_connection()
        else:
            longest.hang_up()

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
        self.idle.pop(self, None)  # to the end
        self.idle[self] = None

    def start_head_timer(self) -> None:
        """From its first byte, or from the begin of the connection; what comes later gains no time."""
        if not self.head_timer:
            self.head_timer = self.loop.call_later(self.limits.head_timeout_s, self.head_timed_out)

    def cancel_head_timer(self) -> None:
        self.head_timer = cancel_timer(self.head_timer)

    def head_timed_out(self) -> None:
        if self.conn.trailing_data[0]:
            what = f"the request's headers did not come within {self.limits.head_timeout_s:.3g} s"
            self.refuse(MalformedRequest(what, 408))
        else:
            self.hang_up()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, called while it handles what h11 says of the fault; with h11's own status and words."""
        fault = sys.exc_info()[1]
        status = getattr(fault, "error_status_hint", 400)
        self.refuse(MalformedRequest(f"that is no request ({fault})"[:200], status))

    def refuse(self, error: LocalLLMError) -> None:
        """The last that is said; nothing where an answer has begun."""
        if self.is_busy and self.cycle.response_started:
            self.transport.abort()
            return
        answer = error_response(error, self.scope["path"] if self.is_busy else "/", {"Connection": "close"})
        head = h11.Response(status_code=answer.status_code, headers=answer.raw_headers)
        parts = (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.hang_up()

    def refuse_connection(self) -> None:
        """Before anything is read, so in no API's own words."""
        body = json.dumps(TOO_MANY_CONNECTIONS).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.hang_up()

    def hang_up(self) -> None:
        """Once what was said has been taken; `stalled` sees to those who do not take it."""
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
        waits = self.transport.get_write_buffer_size()
        self.reader_timer = self.loop.call_later(self.limits.reader_timeout_s, self.check_reader, waits)

    def check_reader(self, waited: int) -> None:
        """Break off where the client has taken next to nothing of `waited` bytes, and cancel its answer."""
        if waited - self.transport.get_write_buffer_size() < self.limits.min_reader_bytes:
            self.transport.abort()
        else:
            self.start_reader_timer()


def cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
