"""Process-level faults: signals during streams, kills, ports in use, a full queue, log forging."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import quote

import httpx2
import openai
import pytest

from localllm.errors import LocalLLMError, UsageError
from localllm.server.serve import bind
from tests.server.attacks.wire import (
    COMPLETION,
    KEY,
    completion_request,
    connect,
    exchange,
    read_response,
    read_to_end,
    request,
)

LONG = COMPLETION | {"max_tokens": 150, "stream": True}
MANY = 20
HEALTH = request("GET", "/health", body=b"")
PAGE = "https://chat.example.org"
FORGED = "\n2026-11-22 ERROR the disk is full\x1b[2J"


@contextmanager
def started(*flags):
    """Start a server in its own process on a free port, and yield it with its URL."""
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (found := re.search(r"listening on (\S+)", line := process.stderr.readline())):
                assert line, "it ended"
            yield process, found[1]
        finally:
            process.kill()


def refused(*flags):
    """Error message for refused flags."""
    command = [sys.executable, "-m", "localllm", "serve", "demo", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.slow
def test_sigterm_drains_twenty_streams_and_accepts_nothing_new():
    begun = threading.Barrier(MANY + 1)

    def stream(url):
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            begun.wait(60)
            return [first, *lines]

    with started() as (process, url), ThreadPoolExecutor(MANY) as pool, connect(url) as idle:
        idle.sendall(HEALTH)
        assert read_response(idle).status == 200
        streams = [pool.submit(stream, url) for _ in range(MANY)]
        begun.wait(60)
        process.send_signal(signal.SIGTERM)
        assert read_to_end(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(url)
        said = [[line for line in future.result() if line] for future in streams]
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    assert all(lines[-1] == "data: [DONE]" for lines in said)
    assert all('"finish_reason":"length"' in lines[-2] for lines in said)
    assert {len(lines) for lines in said} == {len(said[0])}


@pytest.mark.slow
def test_a_port_is_free_as_soon_as_its_server_is_killed():
    with started() as (process, url), connect(url) as stream:
        port = url.rpartition(":")[2]
        said = refused("--port", port)
        assert f"cannot listen on port {port}" in said
        assert "(Address already in use); another server, such as Ollama" in said
        stream.sendall(completion_request(max_tokens=800, stream=True))
        stream.recv(1, 2)
        process.kill()
        process.wait(60)
        with started("--port", port) as (_, again):
            assert again == url
            assert exchange(again, completion_request()).status == 200


def test_a_server_of_another_kind_on_the_port_is_left_alone():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        assert "such as Ollama" in refused("--port", str(other.server_address[1]))


def test_a_port_is_bound_before_the_model_loads():
    """Of two servers that start at once, one fails before it loads its model."""
    with bind("127.0.0.1", 0) as first, pytest.raises(UsageError, match="cannot listen"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_reachable_address_needs_a_key():
    assert "0.0.0.0 can be reached from other machines" in refused("--host", "0.0.0.0", "--port", "0")


@pytest.mark.slow
def test_access_follows_flags_and_environment_and_logs_cannot_be_forged(tmp_path, monkeypatch):
    certificate, key, keys = (tmp_path / name for name in ("cert.pem", "key.pem", "keys"))
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    keys.write_text("first-key-of-the-file\nsecond-key-of-the-file\n")
    monkeypatch.setenv("LOCALLLM_API_KEY", KEY)
    flags = ["--host", "0.0.0.0", "--api-key-file", keys, "--tls-cert", certificate, "--tls-key", key]
    flags += ["--host-name", "box.example.org", "--origin", PAGE]
    with started(*map(str, flags)) as (process, url):
        assert url.startswith("https://0.0.0.0:")
        own = {"Host": "box.example.org", "Origin": PAGE}
        url = url.replace("0.0.0.0", "127.0.0.1")
        with httpx2.Client(base_url=url, verify=False, headers=own, timeout=30) as client:
            assert client.get("/v1/models").status_code == 401
            for sent in (KEY, "second-key-of-the-file"):
                answer = client.get("/v1/models", headers={"Authorization": f"Bearer {sent}"})
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
            authorized = {"Authorization": f"Bearer {KEY}"}
            client.post("/v1/completions", json=COMPLETION | {"model": f"demo{FORGED}"}, headers=authorized)
            client.post("/v1/completions", json=COMPLETION | {"prompt": FORGED}, headers=authorized)
            client.get(f"/v1/models/{quote(FORGED)}", headers=authorized)
            client.get(f"/{quote(FORGED)}", headers=authorized | {"User-Agent": "\x1b[2J"})
            client.get("/", headers={"Host": "evil\x1b[2J"})
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
    assert "\x1b" not in log and "Traceback" not in log and KEY not in log
    assert not re.search("^2026-11-22 ERROR", log, re.MULTILINE)


class Full(LocalLLMError):
    http_status = 503
    retry_after = 7


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_reported_with_retry_after(demo_url, demo, monkeypatch, stream):
    def submit(*_):
        raise Full("512 requests are waiting", "ask again later")

    monkeypatch.setattr(demo, "submit", submit)
    said = exchange(demo_url, completion_request(stream=stream))
    assert (said.status, said.headers["retry-after"]) == (503, "7")
    assert json.loads(said.body)["error"]["type"] == "api_error"
    client = openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.InternalServerError, match="are waiting"):
        client.completions.create(model="demo", prompt="x", stream=stream)


def test_a_server_survives_clients_leaving_at_any_time(demo_url, demo):
    whole = completion_request(max_tokens=50, stream=True)
    for cut in range(0, len(whole) + 1, 7):
        with connect(demo_url) as connection:
            connection.sendall(whole[:cut])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    assert exchange(demo_url, completion_request()).status == 200
    while demo.worker.outputs:
        time.sleep(0.01)
