"""The server process: listening socket, connections, start-up and shutdown.

The first SIGTERM or Ctrl-C shuts it down gracefully: no new requests are accepted, and answers in progress have
`DRAIN_TIMEOUT_S` to finish. The second ends it at once.
"""

import asyncio
import json
import logging
import math
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalLLMError, MalformedRequest, UsageError
from localllm.formatting import format_seconds
from localllm.server.access import parse_ip_address
from localllm.server.guard import ConnectionLimits, error_response

DEFAULT_PORT = 11434
DRAIN_TIMEOUT_S = 30
SEND_BUFFER_BYTES = 64 * 2**10  # kernel buffer of each connection; the default grows to megabytes
BACKLOG = 1024  # connections waiting to be accepted
ACCEPT_BATCH = 128  # connections accepted per wake-up, which may exceed the limit for a moment
TOO_MANY_CONNECTIONS = {"error": "too many connections are open; try again later"}


class Connection(H11Protocol):
    """uvicorn's protocol with timeouts, a connection limit, and errors in the API's format. uvicorn alone waits
    forever for headers and for clients that do not read, and accepts any number of connections."""

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


class Server(uvicorn.Server):
    """uvicorn's server with connection limits, a TLS handshake timeout, and a second stage of shutdown."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        on_listening: Callable[[str], object],
        on_shutdown: Callable[[], Awaitable[None]],
        on_abort: Callable[[], object] = lambda: None,
        *,
        notify: Callable[[str], object] = lambda message: None,
        model_names: Sequence[str] = (),
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        on_closing: Callable[[], object] = lambda: None,
        on_hangup: Callable[[], object] | None = None,
        exit_when_idle_s: float = math.inf,
        is_loading: Callable[[], bool] = lambda: False,
    ):
        """Create the server.

        listener: socket as returned by `bind`; on_listening: called with "listening on URL" once it accepts
        connections; on_shutdown: awaited after the last answer; on_abort: called when running and queued answers
        have no time left; notify: called with further messages for the operator; model_names: names of the loaded
        models, for such a message; on_closing: called before it stops to accept connections; on_hangup: called on
        SIGHUP, which ends the process otherwise; exit_when_idle_s: time without requests after which it shuts
        down; is_loading: whether a model is being loaded, so that it is not idle.
        """
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.max_head_bytes,
            timeout_keep_alive=limits.keep_alive_s,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings let clients fill the log
        self.limits = limits
        self.tls = tls
        self.listener = listener
        self.on_listening = on_listening
        self.notify = notify
        self.model_names = model_names
        self.on_shutdown = on_shutdown
        self.on_abort = on_abort
        self.on_closing = on_closing
        self.on_hangup = on_hangup
        self.exit_when_idle_s = exit_when_idle_s
        self.is_loading = is_loading
        self.last_active_at = time.monotonic()
        self.seen_requests = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, as uvicorn does, but with `Connection` and a TLS handshake timeout."""
        connect = partial(Connection, self.limits, {}, config=self.config, server_state=self.server_state)
        listening = await asyncio.get_running_loop().create_server(
            lambda: connect(app_state=self.lifespan.state),
            sock=self.listener,
            ssl=self.tls,
            backlog=ACCEPT_BATCH,
            ssl_handshake_timeout=self.limits.head_timeout_s if self.tls else None,
        )
        self.listener.listen(
            BACKLOG
        )  # asyncio also uses its `backlog` as the number of connections to accept at once
        self.servers = [listening]
        self.started = True
        self.last_active_at = time.monotonic()
        url = listener_url(self.listener, "https" if self.tls else "http")
        self.on_listening(f"listening on {url}")
        self.notify(f"{', '.join(self.model_names) or 'no model'} loaded; chat page at {url}/ui")

    async def on_tick(self, counter: int) -> bool:
        """Shut down after `exit_when_idle_s`. Called ten times a second."""
        if not self.should_exit and self.idle_s() > self.exit_when_idle_s:
            self.notify(f"no request for {format_seconds(self.exit_when_idle_s)}; shutting down")
            self.request_exit()
        return await super().on_tick(counter)

    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 during requests and loads."""
        requests = self.server_state.total_requests
        if self.server_state.tasks or self.is_loading() or requests != self.seen_requests:
            self.seen_requests, self.last_active_at = requests, time.monotonic()
        return time.monotonic() - self.last_active_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_closing()
        await super().shutdown(sockets)
        await self.on_shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again at the end, as uvicorn does: SIGTERM would kill the drained
        process with a non-zero status."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.request_exit)
        if self.on_hangup:
            loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
            signals = (*signals, signal.SIGHUP)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def request_exit(self) -> None:
        """Drain on the first call; close all connections, which cancels their answers, on the second."""
        if self.should_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            self.on_abort()
            return
        self.should_exit = True
        if answers := len(self.server_state.tasks):
            message = f"waiting up to {DRAIN_TIMEOUT_S} s for running requests ({answers})"
            self.notify(f"{message}; Ctrl-C or SIGTERM again cancels them")
        asyncio.get_running_loop().call_later(DRAIN_TIMEOUT_S, self.request_exit)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until shutdown."""
        asyncio.run(self.serve(sockets or [self.listener]))


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket, before models are loaded. port: 0 for any free port.

    Raises UsageError if the address is not an address of this machine, or the port is taken.
    """
    address = parse_ip_address(host)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    # With the protocol, which accepted connections inherit: asyncio sets TCP_NODELAY on those that have it.
    # Otherwise the end of each answer waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
        )  # inherited by accepted connections
        listener.bind((str(address), port))
        listener.listen(BACKLOG)  # fails now if another process shares the address
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on port {port} of {host} ({reason})",
            "another server, such as Ollama, may be using it: choose another --port, or 0 for any free one",
        ) from None
    return listener


def listener_url(listener: socket.socket, scheme: str = "http") -> str:
    """URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
