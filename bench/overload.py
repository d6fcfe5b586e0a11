"""A server of a small model under overload: overlong prompts, clients that disconnect, slow clients, and many
streams at once.

    python -m bench.overload [--model demo] [--streams 64] [--slow 500]

Refusal: seconds until a prompt of 15 MB is refused, divided by those until the same body is refused for an unknown
model. Disconnect: seconds from closing all streams until `/localllm/top` shows no request. Slow clients:
95th percentile of a short request beside connections that send their headers byte by byte, divided by that without
them, in turns. Streams: times to first token of all at once, and the seconds until one request with as many
prompts is answered. All over loopback.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm.client.server import ServerClient
from localllm.metrics import percentile

LONG_BYTES = 15_000_000
SHORT_REQUESTS = 20  # per turn
TURNS = 3
LONG_PATHS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/api/generate": "prompt",
    "/v1/embeddings": "input",
}


def post(address: tuple[str, int], path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and return its connection."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(address, 60)
    head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as response:
        return response.read()


def refusals(address: tuple[str, int], model: str) -> dict[str, float]:
    """Return the seconds until each API refuses a prompt of 15 MB, relative to a body whose model is unknown."""
    text, ratios = "the quick brown fox " * (LONG_BYTES // 20), {}
    for path, field in LONG_PATHS.items():
        value = [{"role": "user", "content": text}] if field == "messages" else text
        seconds = []
        for name in ("no-such-model", model):
            start = time.perf_counter()
            answer = read_all(post(address, path, {"model": name, field: value, "max_tokens": 4}))
            seconds.append(time.perf_counter() - start)
            assert answer.split(b" ", 2)[1] == (b"400" if name == model else b"404"), answer[:300]
        print(f"  {path}: {seconds[1]:.2f} s, unknown model {seconds[0]:.2f} s", file=sys.stderr)
        ratios[path] = seconds[1] / seconds[0]
    return ratios


def answer_body(model: str) -> dict[str, Any]:
    return {"model": model, "temperature": 0, "max_tokens": 200, "ignore_eos": True}


def one_batch(address: tuple[str, int], model: str, count: int) -> float:
    """Return the seconds until a request with the prompts of `streams` is answered."""
    prompts = [f"Once upon a midnight {i}" for i in range(count)]
    start = time.perf_counter()
    answer = read_all(post(address, "/v1/completions", answer_body(model) | {"prompt": prompts}))
    assert answer.split(b" ", 2)[1] == b"200", answer[:300]
    return time.perf_counter() - start


def streams(address: tuple[str, int], model: str, count: int) -> dict[str, float]:
    """Return times to first token of this many streams, and the seconds from closing them until all are free."""
    body = answer_body(model) | {"stream": True}
    first: list[float] = []

    def wait(connection: socket.socket, start: float) -> None:
        received = b""
        while b"data:" not in received:
            received += connection.recv(4096)
        first.append(time.perf_counter() - start)

    begin = time.perf_counter()
    opened = [post(address, "/v1/completions", body | {"prompt": f"Once upon a time {i}"}) for i in range(count)]
    readers = [threading.Thread(target=wait, args=(connection, begin)) for connection in opened]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    closed = time.perf_counter()
    for connection in opened:
        connection.close()
    client = ServerClient(f"{address[0]}:{address[1]}")
    while in_flight(client):
        time.sleep(0.005)
    free_s = time.perf_counter() - closed
    client.close()
    return {"ttft_p50_s": statistics.median(first), "ttft_max_s": max(first), "free_s": free_s}


def in_flight(client: ServerClient) -> int:
    models = client.request_json("/localllm/top")["models"]
    return sum(each["running"] + each["waiting"] for each in models)


def short_requests(address: tuple[str, int], model: str) -> list[float]:
    seconds = []
    for _ in range(SHORT_REQUESTS):
        start = time.perf_counter()
        read_all(post(address, "/v1/completions", {"model": model, "prompt": "Once", "max_tokens": 4}))
        seconds.append(time.perf_counter() - start)
    return seconds


def beside_slow_clients(address: tuple[str, int], model: str, count: int) -> float:
    """Return the 95th percentile beside slow clients, relative to that without them."""
    alone, beside = list[float](), list[float]()
    for _ in range(TURNS):
        alone += short_requests(address, model)
        with ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(count)]
            stop = threading.Event()
            sender = threading.Thread(target=drip, args=(slow, stop))
            sender.start()
            beside += short_requests(address, model)
            stop.set()
            sender.join()
    return percentile(beside, 95) / percentile(alone, 95)


def drip(connections: list[socket.socket], stop: threading.Event) -> None:
    """Send one byte of a header on each connection, about once a second."""
    for byte in b"GET / HTTP/1.1\r\nX: " + b"a" * 1000:
        for connection in connections:
            try:
                connection.send(bytes([byte]))
            except OSError:  # the server has closed it
                continue
        if stop.wait(1):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--slow", type=int, default=500)
    flags = parser.parse_args()
    command = [sys.executable, "-m", "localllm", "serve", flags.model, "--port", "0", "--log-format", "off"]
    folder = Path(__file__).parents[1]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as server:
        assert server.stderr
        try:
            url = urlsplit(server.stderr.readline().removeprefix("listening on ").strip())
            address = url.hostname or "", url.port or 0
            short_requests(address, flags.model)
            result: dict[str, Any] = {"streams": streams(address, flags.model, flags.streams)}
            print(json.dumps(result), file=sys.stderr)
            result["one batch, s"] = one_batch(address, flags.model, flags.streams)
            result["one stream"] = streams(address, flags.model, 1)
            result["p95 beside slow clients"] = beside_slow_clients(address, flags.model, flags.slow)
            print(json.dumps(result), file=sys.stderr)
            result["refusal"] = refusals(address, flags.model)
        finally:
            server.terminate()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
