"""The server's process: where it listens, when it is ready, and how it ends.

The first SIGTERM or Ctrl-C ends it gracefully: nothing new is taken, answers under way have `DRAIN_S` to end. The
second ends it at once.
"""

import asyncio
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from localllm.errors import UsageError
from localllm.server.access import parse_ip_address
from localllm.server.connection import Connection
from localllm.server.guard import ConnectionLimits

DEFAULT_PORT = 11434
DRAIN_TIMEOUT_S = 30
SEND_BUFFER_BYTES = 64 * 2**10  # that the system keeps for a client who does not read; else it may be megabytes
BACKLOG = 1024  # connections that wait to be accepted
ACCEPT_BATCH = 128  # in one go, and so open at once beyond the limit


class Server(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        on_listening: Callable[[str], object],
        on_shutdown: Callable[[], Awaitable[None]],
        on_abort: Callable[[], object] = lambda: None,
        *,
        remark: Callable[[str], object] = lambda words: None,
        model_names: Sequence[str] = (),
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
    ):
        """listener: as `bind` gives it; on_listening: is told where it listens, once it does; on_shutdown: is
        awaited once all
        answers have ended; on_abort: is called when answers under way have no time left, also those that wait;
        remark: is told what else a person may want to know; model_names: of models that are loaded."""
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
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings let strangers fill the log
        self.limits = limits
        self.tls = tls
        self.listener = listener
        self.on_listening = on_listening
        self.remark = remark
        self.model_names = model_names
        self.on_shutdown = on_shutdown
        self.on_abort = on_abort

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own knows no limits of connections, and no time-out of TLS."""
        connect = partial(Connection, self.limits, {}, config=self.config, server_state=self.server_state)
        listening = await asyncio.get_running_loop().create_server(
            lambda: connect(app_state=self.lifespan.state),
            sock=self.listener,
            ssl=self.tls,
            backlog=ACCEPT_BATCH,
            ssl_handshake_timeout=self.limits.head_timeout_s if self.tls else None,
        )
        self.listener.listen(BACKLOG)  # which asyncio takes for the number that it accepts in one go
        self.servers = [listening]
        self.started = True
        url = listener_url(self.listener, "https" if self.tls else "http")
        self.on_listening(f"listening on {url}")
        self.remark(f"{', '.join(self.model_names) or 'no model'} loaded; a page to chat is at {url}/ui")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self.on_shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end: SIGTERM would kill the process that has drained."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.request_exit)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def request_exit(self) -> None:
        if self.should_exit:  # for the second time: their clients are gone, and so answers are cancelled
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            self.on_abort()
            return
        self.should_exit = True
        if answers := len(self.server_state.tasks):
            self.remark(
                f"{answers} under way have {DRAIN_TIMEOUT_S} s to end; the next Ctrl-C or SIGTERM breaks them off"
            )
        asyncio.get_running_loop().call_later(DRAIN_TIMEOUT_S, self.request_exit)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Comes back when it has ended."""
        asyncio.run(self.serve(sockets or [self.listener]))


def bind(host: str, port: int) -> socket.socket:
    """An address of this machine, taken before a model is loaded for it; `access_of` says which ones may be had.
    port 0: any that is free.

    Raises UsageError for an address that is none of this machine, and for a port that is taken.
    """
    place = parse_ip_address(host)
    listener = socket.socket(socket.AF_INET if place.version == 4 else socket.AF_INET6)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # of all that are accepted
        listener.bind((str(place), port))
        listener.listen(BACKLOG)  # else two that share the address would find out only now
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"port {port} of {host} cannot be had ({why})",
            "another server may have it, such as Ollama or one of ours: give another --port; 0 is any",
        ) from None
    return listener


def listener_url(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
