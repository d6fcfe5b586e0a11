"""A request to a background server that ends before it answers is sent to the server that replaces it."""

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import pytest

from localllm.client import server as client
from localllm.client.background import find_server
from localllm.client.server import ServerClient
from localllm.errors import ServerUnreachable

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PREFACE, FIRST, SECOND = ({"prompt_ids": [1]}, {"event": 1}, {"event": 2})
NO_PAUSES = (0.0, 0.0, 0.0)


def chunk(value):
    line = json.dumps(value).encode() + b"\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


ENDINGS = {  # what a server sends before it is killed
    "nothing": b"",
    "half a status line": b"HTTP/1.",
    "half a head": b"HTTP/1.1 200 OK\r\nTransfer-",
    "a head": HEAD,
    "half a line": HEAD + b"40\r\n{",
    "the preface": HEAD + chunk(PREFACE),
    "the preface and half a line": HEAD + chunk(PREFACE) + b"40\r\n{",
}


class Servers:
    """A server that is killed after each of `endings`, one connection each, then answers; it counts requests."""

    def __init__(self, endings):
        self.endings = list(endings)
        self.requests = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection:
                    self.answer(connection)

    def answer(self, connection):
        content = connection.recv(65536)
        self.requests += content.startswith(b"POST")
        if self.endings:
            connection.sendall(self.endings.pop(0))
            linger = struct.pack("ii", 1, 0)  # reset the connection, as the kernel does for a killed process
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return
        connection.sendall(HEAD + chunk(PREFACE) + chunk(FIRST) + chunk(SECOND) + b"0\r\n\r\n")


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(client, "RETRY_PAUSES_S", NO_PAUSES)
    made = []

    def start(endings):
        made.append(Servers(endings))
        return made[-1]

    yield start
    for servers in made:
        servers.listener.close()


def connect(servers, *, locates=True):
    server = ServerClient(servers.url)
    if locates:
        server.locate = lambda: servers.url
    return closing(server)


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_answer_that_has_not_begun_is_requested_again(serve, ending):
    servers = serve([ENDINGS[ending]])
    with connect(servers) as server:
        assert list(server.stream_json("/x", {}, preface_lines=1)) == [PREFACE, FIRST, SECOND]
    assert servers.requests == 2


def test_an_answer_that_has_begun_is_not(serve):
    servers = serve([HEAD + chunk(PREFACE) + chunk(FIRST)])
    with connect(servers) as server:
        lines = server.stream_json("/x", {}, preface_lines=1)
        assert [next(lines), next(lines)] == [PREFACE, FIRST]
        with pytest.raises(ServerUnreachable, match="closed the connection"):
            next(lines)
    assert servers.requests == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_json_object_is_requested_again(serve, ending):
    servers = serve([ENDINGS[ending]])
    with connect(servers) as server, pytest.raises(client.NotLocalLLMServer):  # three objects, not one
        server.request_json("/x", {})
    assert servers.requests == 2


def test_a_server_that_is_not_a_background_server_gets_one_request(serve):
    servers = serve([b""])
    with connect(servers, locates=False) as server, pytest.raises(ServerUnreachable):
        list(server.stream_json("/x", {}))
    assert servers.requests == 1


def test_a_connection_that_the_server_has_closed_is_opened_again(serve):
    servers = serve([])
    with connect(servers, locates=False) as server:
        for _ in range(2):
            assert list(server.stream_json("/x", {})) == [PREFACE, FIRST, SECOND]
    assert servers.requests == 2


def test_a_server_that_never_answers_is_given_up(serve):
    servers = serve([b""] * 20)
    with connect(servers) as server, pytest.raises(ServerUnreachable):
        list(server.stream_json("/x", {}))
    assert servers.requests == 1 + len(NO_PAUSES)


def test_no_request_follows_a_close(serve):
    servers = serve([])
    with connect(servers) as server:
        lines = server.stream_json("/x", {}, preface_lines=1)
        servers.endings = [b""] * 9
        lines.close()
        with pytest.raises((OSError, ValueError, ServerUnreachable)):
            list(lines)
    assert servers.requests == 1


COMMAND = [sys.executable, "-m", "localllm", "run", "demo", "hi", "--temperature", "0", "--max-tokens", "12"]


@pytest.mark.slow
def test_a_run_beside_a_kill_at_any_moment_answers(tmp_path):
    """Each run begins while the server of the last one is killed, at a random moment of its start."""
    home = tmp_path / "home"
    environment = os.environ | {"LOCALLLM_HOME": str(home), "LOCALLLM_BACKGROUND": "5m"}
    for name in ("LOCALLLM_HOST", "LOCALLLM_API_KEY"):
        environment.pop(name, None)

    def start():
        pipe = subprocess.PIPE
        return subprocess.Popen(COMMAND, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    try:
        expected, _ = start().communicate(timeout=200)
        begin = time.perf_counter()
        assert start().communicate(timeout=200)[0] == expected != b""
        duration = time.perf_counter() - begin
        moments, retried = random.Random(19), 0
        for _ in range(8):
            if find_server(home) is None:  # killed after it had answered
                assert start().communicate(timeout=200)[0] == expected
            server = find_server(home)
            assert server
            run = start()
            time.sleep(moments.uniform(0, duration))
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
            output, errors = run.communicate(timeout=200)
            if run.returncode:  # allowed only if some of the answer had arrived
                assert output and expected.startswith(output.rstrip(b"\n")), (output, errors)
                assert b"closed the connection" in errors
                assert start().communicate(timeout=200)[0] == expected
            else:
                assert (output, errors) == (expected, b"")
                retried += (found := find_server(home)) is not None and found.pid != server.pid
        assert retried
    finally:
        if server := find_server(home):
            os.kill(server.pid, signal.SIGKILL)
