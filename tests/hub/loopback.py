"""A hub of models on this machine that answers `huggingface_hub` as huggingface.co does, and errs on order.

    with LoopbackHub() as hub:                               # HF_ENDPOINT=hub.url, in this process or in another
        commit = hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": weights})
        fault = hub.disturb(reset(at=1000), "model.safetensors", times=2)
        ...
        assert fault.met == 2 and hub.sent("model.safetensors") < 2 * len(weights)

Large files lie on a second server that has another name, as at the Hub.
"""

import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote

from tests.hub.answers import Answers, End, Reply
from tests.hub.faults import Change, Fault

CHUNK = 2**16


@dataclass
class Request:
    """A received request, with the number of bytes sent in reply."""

    server: str  # `hub` or `cdn`
    method: str
    target: str
    headers: dict[str, str]  # names in small letters
    status: int = 0
    sent: int = 0  # bytes of the body

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


class LoopbackHub(Answers):
    rate: int | None = None
    """Bytes a second of each body, so that there is time to break off."""

    def __init__(self) -> None:
        self.servers = [_Server("hub", self), _Server("cdn", self)]
        ports = [server.server_port for server in self.servers]
        super().__init__(url=f"http://127.0.0.1:{ports[0]}", cdn=f"http://localhost:{ports[1]}")
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.bugs: list[BaseException] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def disturb(
        self, change: Change, match: str = "", *, method: str | None = "GET", times: int | None = 1
    ) -> Fault:
        """Apply `change` to the next replies whose target contains a match of the regular expression `match`, such
        as a file name, `/tree/` or `/cdn/.*model`. The first of several matching faults applies.
        """
        self.faults.append(Fault(change, match, method, times))
        return self.faults[-1]

    def sent(self, match: str = "") -> int:
        """Bytes of bodies sent for targets that match."""
        return sum(request.sent for request in self.requests if re.search(match, unquote(request.target)))

    def __enter__(self) -> "LoopbackHub":
        for server in self.servers:
            server.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.closing.set()
        for server in self.servers:
            server.close()
        if self.bugs and not error:
            raise self.bugs[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them
    request_queue_size = 128

    def __init__(self, name: str, hub: LoopbackHub):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.hub = name, hub
        self.open: set[socket.socket] = set()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), name=f"loopback {name}")

    def close(self) -> None:
        end = threading.Thread(target=self.shutdown)
        end.start()
        with suppress(OSError):  # it has ended already
            socket.create_connection(self.server_address).close()  # so that it sees at once that it is to end
        end.join()
        with self.hub.lock:
            for connection in self.open:
                with suppress(OSError):  # the other end was faster
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        self.thread.join()

    def process_request(self, request, client_address) -> None:
        with self.hub.lock:
            self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        with self.hub.lock:
            self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        error = sys.exception()
        if error and not isinstance(error, OSError):  # that is a client that went away, as clients of tests do
            self.hub.bugs.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms until the client has acknowledged the header
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.server.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.server.name, self.command, self.path, headers)
        hub.requests.append(request)
        answer = hub.hub if self.server.name == "hub" else hub.store
        self._send(self._disturbed(answer(self.path, headers)), request)

    do_HEAD = do_GET

    def _disturbed(self, reply: Reply) -> Reply:
        with self.server.hub.lock:
            for fault in self.server.hub.faults:
                changed = fault.change(reply) if fault.means(self.command, unquote(self.path)) else None
                if changed is not None:
                    fault.met += 1
                    return changed
        return reply

    def _send(self, reply: Reply, request: Request) -> None:
        request.status = reply.status
        if reply.status:
            self.send_response_only(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
        if self.command == "GET":
            self._send_body(reply.body, request)
        self.close_connection = self.close_connection or reply.end is not End.KEEP
        if reply.end is End.STALL:
            self.connection.recv(1)  # comes back when either end closes
        elif reply.end is End.RESET:
            time.sleep(0.05)  # a reset may overtake what was sent before
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            socket.socket(fileno=self.connection.detach()).close()

    def _send_body(self, body: bytes, request: Request) -> None:
        hub = self.server.hub
        step = max(1, min(CHUNK, hub.rate // 20)) if hub.rate else CHUNK
        for start in range(0, len(body), step):
            chunk = body[start : start + step]
            request.sent += len(chunk)  # before, so that a client that has it all finds it counted
            self.wfile.write(chunk)
            if hub.rate:
                hub.closing.wait(step / hub.rate)
