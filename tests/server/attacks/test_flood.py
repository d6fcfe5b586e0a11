"""More connections than a server can hold."""

import json
import resource
from contextlib import ExitStack

import pytest

from localllm.server.guard import ConnectionLimits
from tests.server.attacks.wire import (
    LONG,
    completion_request,
    connect,
    connect_narrow,
    exchange,
    read_response,
    read_to_end,
    request,
)
from tests.server.conftest import serving

HEALTH = request("GET", "/health", body=b"")
MANY = 1000


@pytest.fixture
def files():
    """Raise the limit of open files, since both ends of every connection belong to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * MANY)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("begun", [b"", HEALTH[:20]], ids=["silent", "with half a request"])
def test_a_thousand_connections_leave_the_server_answering(demo_url, files, begun):
    with ExitStack() as stack:
        flood = [stack.enter_context(connect(demo_url)) for _ in range(MANY)]
        for connection in flood[-400:] if begun else []:
            connection.sendall(begun)
        assert exchange(demo_url, completion_request()).status == 200
        held = flood[-ConnectionLimits().max_connections :]
        assert read_to_end(flood[0]) == b"", "the longest idle made room"
        held[-1].sendall(HEALTH[len(begun) :])
        assert read_response(held[-1]).status == 200


def test_a_stream_in_progress_outlasts_a_flood(demo_url, demo, files):
    with ExitStack() as stack:
        stream = stack.enter_context(connect(demo_url))
        stream.sendall(completion_request(max_tokens=200, stream=True))
        stream.recv(1, 2)
        for _ in range(MANY):
            stack.enter_context(connect(demo_url))
        said = read_response(stream)
    assert said.body.endswith(b"data: [DONE]\n\n")


def test_a_busy_server_refuses_new_connections_with_retry_after(demo):
    with serving(demo, limits=ConnectionLimits(max_connections=2)) as url, ExitStack() as stack:
        streams = [stack.enter_context(connect_narrow(url)) for _ in range(2)]
        for stream in streams:
            stream.sendall(completion_request(**LONG))
            stream.recv(1)
        with connect(url) as connection:
            said = read_response(connection)  # before it has asked
        assert (said.status, said.headers["retry-after"]) == (503, "1")
        assert "too many connections" in json.loads(said.body)["error"]


def test_an_idle_connection_makes_room_for_a_new_one(demo):
    with (
        serving(demo, limits=ConnectionLimits(max_connections=2)) as url,
        connect(url) as idle,
        connect(url) as stream,
    ):
        idle.sendall(HEALTH)
        assert read_response(idle).status == 200
        stream.sendall(completion_request(max_tokens=300, stream=True))
        stream.recv(1, 2)
        assert exchange(url, HEALTH).status == 200
        assert read_to_end(idle) == b""
        assert b"[DONE]" in read_response(stream).body
