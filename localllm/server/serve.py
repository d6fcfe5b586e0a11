"""The server's process: where it listens, when it is ready, and how it ends.

The first SIGTERM or Ctrl-C ends it gracefully: nothing new is taken, answers under way have `DRAIN_S` to end. The
second ends it at once.
"""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from localllm.errors import UsageError

USUAL_PORT = 11434
DRAIN_S = 30


class Server(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        say: Callable[[str], object],
        end: Callable[[], Awaitable[None]],
        abandon: Callable[[], object] = lambda: None,
    ):
        """listener: as `bind` gives it; say: is told where it listens, once it does; end: is awaited once all
        answers have ended; abandon: is called when answers under way have no time left, also those that wait."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self.listener = listener
        self.say = say
        self.end = end
        self.abandon = abandon

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.say(f"listening on {address(self.listener)}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end: SIGTERM would kill the process that has drained."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        if self.should_exit:  # for the second time: their clients are gone, and so answers are cancelled
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            self.abandon()
            return
        self.should_exit = True
        asyncio.get_running_loop().call_later(DRAIN_S, self.leave)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Comes back when it has ended."""
        asyncio.run(self.serve(sockets or [self.listener]))


def bind(host: str, port: int) -> socket.socket:
    """An address of this machine alone, taken before a model is loaded for it. port 0: any that is free.

    Raises UsageError for an address that others can reach, and for a port that is taken.
    """
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        place = ipaddress.ip_address(name)
    except ValueError:
        raise UsageError(f"{host} is no address", "give 127.0.0.1 or ::1") from None
    if not place.is_loopback:
        raise UsageError(
            f"{host} can be reached from other machines, and there are no keys yet to keep strangers out",
            "give 127.0.0.1 or ::1",
        )
    listener = socket.socket(socket.AF_INET if place.version == 4 else socket.AF_INET6)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((name, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"port {port} of {host} cannot be had ({why})", "give another --port; 0 is any") from None
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
