"""Addresses that a server listens on, and the start and end of its process."""

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest

from localllm.errors import UsageError
from localllm.server.serve import bind, listener_url

LONG = {"model": "demo", "prompt": "Once", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("host", ["example.org", "", "127.1", "0"])
def test_names_are_not_looked_up(host):
    with pytest.raises(UsageError, match=r"is not an IP address; use 127\.0\.0\.1, ::1"):
        bind(host, 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2"])
def test_addresses_of_this_machine_alone_are_taken(host):
    with bind(host, 0) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.[12]:\d+", listener_url(listener))


def test_a_port_in_use_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="choose another --port"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_the_end_of_an_answer_does_not_wait_for_an_acknowledgement():
    async def accept(listener: socket.socket) -> int:
        connected = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connected.set_result(transport.get_extra_info("socket"))

        async with await asyncio.get_running_loop().create_server(Accepted, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return (await connected).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    with bind("127.0.0.1", 0) as listener:
        assert asyncio.run(accept(listener))


@pytest.fixture
def process():
    with subprocess.Popen(
        [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_sigterm_drains_a_running_answer_and_accepts_no_new_one(process):
    url = process.stderr.readline().removeprefix("listening on ").strip()
    health = httpx2.get(f"{url}/health").json()
    assert (health["status"], health["models"], health["loading"]) == ("ok", ["demo"], [])
    with httpx2.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx2.NetworkError):  # refused, or reset if it waited to be accepted
            while True:  # uvicorn looks ten times a second
                httpx2.get(f"{url}/health")
                time.sleep(0.05)
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) == 0
    welcome, *log = process.stderr
    assert welcome == f"demo loaded; chat page at {url}/ui\n"
    waits = "waiting up to 30 s for running requests (1); Ctrl-C or SIGTERM again cancels them\n"
    before, after = log[: log.index(waits)], log[log.index(waits) + 1 :]
    assert {what(line) for line in before} == {"request"}  # a check of its health, or several
    assert [what(line) for line in after][-2:] == ["request", "unloaded"]


def what(line):
    """Event name in a line of the log."""
    return dict(word.split("=", 1) for word in shlex.split(line))["event"]


@pytest.mark.slow
def test_a_second_signal_aborts_a_stalled_answer(process):
    asked = LONG | {"max_tokens": 900, "logprobs": 20, "n": 8}  # more than the system keeps for who does not read
    url = process.stderr.readline().removeprefix("listening on ").strip()
    with httpx2.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert any("running requests" in line for line in process.stderr)  # the first signal is handled
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert [what(line) for line in process.stderr if "event=" in line] == ["request", "unloaded"]
