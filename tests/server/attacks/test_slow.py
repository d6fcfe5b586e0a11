"""Clients that send or read slowly."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from localllm.server.guard import ConnectionLimits
from tests.server.attacks.wire import (
    BODY,
    LONG,
    READER_S,
    completion_request,
    connect,
    connect_narrow,
    exchange,
    read_response,
    read_to_end,
    request,
    wait_until_idle,
)
from tests.server.conftest import serving

QUICK = ConnectionLimits(
    head_timeout_s=0.6,
    body_timeout_s=2,
    body_grace_s=0.5,
    min_body_bytes_per_s=1000,
    keep_alive_s=1,
    reader_timeout_s=READER_S,
)
HEALTH = request("GET", "/health", body=b"")
LATE_S = 20  # what a busy machine may add to a limit
ENDLESS = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000


@pytest.fixture(scope="module")
def url(demo):
    with serving(demo, limits=QUICK) as url:
        yield url


def trickle(connection, sent: bytes, gap_s: float) -> None:
    """Send byte by byte until the server replies."""
    connection.settimeout(gap_s)
    for byte in sent:
        connection.sendall(bytes([byte]))
        try:
            connection.recv(1, 2)  # MSG_PEEK
            break
        except TimeoutError:
            continue
    connection.settimeout(LATE_S)


def assert_at(limit_s: float, began: float) -> None:
    """The limit must be reached, and not exceeded by much. began: before the server's time begins"""
    assert limit_s <= time.monotonic() - began < limit_s + LATE_S


def test_slow_headers(url):
    began = time.monotonic()
    with connect(url) as connection:
        trickle(connection, ENDLESS, 0.05)
        assert_at(QUICK.head_timeout_s, began)
        said = read_response(connection)
    assert (said.status, said.headers["connection"]) == (408, "close")
    assert "headers did not arrive within 0.6 s" in said.message


def test_slow_headers_of_a_second_request(url):
    with connect(url) as connection:
        connection.sendall(HEALTH)
        assert read_response(connection).status == 200
        trickle(connection, ENDLESS, 0.05)
        assert read_response(connection).status == 408


def test_headers_that_never_begin(url):
    began = time.monotonic()
    with connect(url) as connection:
        assert read_to_end(connection) == b""
        assert_at(QUICK.head_timeout_s, began)


def test_slow_body(url):
    began = time.monotonic()
    with connect(url) as connection:
        connection.sendall(request(body=BODY)[: -len(BODY)])
        trickle(connection, BODY, 0.05)
        assert_at(QUICK.body_grace_s, began)
        said = read_response(connection)
        assert read_to_end(connection) == b""
    assert said.status == 408 and "bytes of the body arrived in 0." in said.message


@pytest.mark.slow
def test_a_body_that_comes_fast_enough_but_never_ends(url):
    began = time.monotonic()
    with connect(url) as connection:
        connection.sendall(request("POST", "/v1/completions", "Transfer-Encoding: chunked", body=b""))
        connection.settimeout(0.1)
        while time.monotonic() - began < QUICK.body_timeout_s + LATE_S:
            connection.sendall(b"200\r\n" + b" " * 512 + b"\r\n")
            try:
                connection.recv(1, 2)
                break
            except TimeoutError:
                continue
        connection.settimeout(LATE_S)
        assert read_response(connection).status == 408
    assert_at(QUICK.body_timeout_s, began)


def test_idle_keep_alive(url):
    with connect(url) as connection:
        began = time.monotonic()
        connection.sendall(HEALTH)
        assert read_response(connection).headers.get("connection") != "close"
        assert read_to_end(connection) == b""
        assert_at(QUICK.keep_alive_s, began)


def test_an_answer_that_takes_its_time_is_no_idle_connection(url):
    """No data is sent for longer than every limit."""
    with connect(url) as connection:
        connection.settimeout(60)
        connection.sendall(completion_request(max_tokens=1000))
        assert read_response(connection).status == 200


@pytest.mark.slow
def test_a_client_that_stops_reading_is_disconnected(url, demo):
    with connect_narrow(url) as connection:
        connection.sendall(completion_request(**LONG))
        connection.recv(1, 2)
        wait_until_idle(demo)
        came = read_to_end(connection)
    assert came.startswith(b"HTTP/1.1 200") and b"[DONE]" not in came


@pytest.mark.slow
def test_a_client_that_reads_byte_by_byte_is_disconnected(url, demo):
    with connect_narrow(url) as connection, ThreadPoolExecutor(1) as pool:
        connection.sendall(completion_request(**LONG))
        connection.recv(1)
        alone = pool.submit(wait_until_idle, demo)
        while not alone.done():
            connection.recv(1)
            time.sleep(0.05)
        assert b"[DONE]" not in read_to_end(connection)


@pytest.mark.slow
def test_an_unread_answer_is_disconnected(url, demo):
    with connect_narrow(url) as connection:
        connection.sendall(completion_request(**LONG | {"stream": False}))
        connection.recv(1, 2)
        wait_until_idle(demo)
        came = read_to_end(connection)
    assert came and not came.endswith(b"}")


def test_a_slow_reader_gets_the_complete_answer(url):
    with connect_narrow(url) as connection:
        connection.sendall(completion_request(max_tokens=300, logprobs=20, stream=True))
        came = b""
        while not came.endswith(b"0\r\n\r\n"):
            came += connection.recv(65536)
            time.sleep(0.01)
    assert b"[DONE]" in came


def test_pipelined_requests_are_answered_one_after_the_other(url):
    asked = [f"One day {number}" for number in range(5)]
    with connect(url) as connection:
        connection.sendall(b"".join(completion_request(prompt=prompt, echo=True) for prompt in asked))
        told = [json.loads(read_response(connection).body)["choices"][0]["text"] for _ in asked]
    assert all(text.startswith(prompt) for text, prompt in zip(told, asked, strict=True))


def test_half_a_pipelined_request_has_the_usual_timeout(url):
    with connect(url) as connection:
        began = time.monotonic()
        connection.sendall(completion_request() + HEALTH[:20])
        assert json.loads(read_response(connection).body)["object"] == "text_completion"
        read_to_end(connection)
        assert_at(QUICK.keep_alive_s, began)


def test_slow_connections_do_not_delay_others(url):
    slow = [connect(url) for _ in range(50)]
    try:
        for connection in slow:
            connection.sendall(HEALTH[:10])
        assert exchange(url, HEALTH).status == 200
    finally:
        for connection in slow:
            connection.close()
