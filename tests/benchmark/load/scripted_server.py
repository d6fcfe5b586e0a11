"""A scripted HTTP server on loopback that records its requests."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class Reply:
    parts: Iterable[bytes] = ()  # sent one after the other; a generator may wait in between
    status: int = 200
    kind: str = "text/event-stream"
    headers: dict[str, str] = field(default_factory=dict)


class ScriptedServer(ThreadingHTTPServer):
    """`answer` is called with path and body of each request; the body of a GET is None."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Callable[[str, Body | None], Reply]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[tuple[str, Body]] = []  # those that were posted to be streamed
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "ScriptedServer":
        threading.Thread(target=self.serve_forever, args=(0.02,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send(self.server.answer(self.path, None))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            if body["stream"]:
                self.server.asked.append((self.path, body))
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
        try:
            self.send(self.server.answer(self.path, body))
        finally:
            with self.server.lock:
                self.server.under_way -= 1

    def send(self, reply: Reply) -> None:
        """Send without a Content-Length; the end of the connection ends the body."""
        self.send_response_only(reply.status)
        for name, value in {"Content-Type": reply.kind, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for part in reply.parts:
                self.wfile.write(part)
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client left


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(said: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": reason}]})


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


DONE = event(b"[DONE]")


def completions(path: str, body: Body | None) -> Reply:
    """A server that answers `a b c`, and counts words."""
    if body is None:
        found = path == "/v1/models"
        return Reply([b'{"data": [{"id": "m"}]}' if found else b"{}"], 200 if found else 404, "application/json")
    counts = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": 3}
    if not body["stream"]:
        return Reply([json.dumps({"choices": [{"text": "a"}], "usage": counts}).encode()], kind="application/json")
    return Reply([text("a"), text(" b"), text(" c", "length"), usage(*counts.values()), DONE])
