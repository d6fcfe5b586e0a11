"""Malformed HTTP and request smuggling: one error message each, and nothing in the log."""

import json

import pytest

from localllm.server.guard import ConnectionLimits
from tests.server.attacks.wire import (
    BODY,
    completion_request,
    connect,
    exchange,
    read_response,
    read_to_end,
    request,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = f"Content-Length: {len(BODY)}\r\n".encode()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n\r\n\r\nx\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 20 + b"\r\n\r\n", 400),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /hea lth HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /hea\x00lth HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 403),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\x01: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\rY: b\r\n\r\n", 400),
        (HEAD + b"X: " + b"a" * (ConnectionLimits().max_head_bytes + 1), 431),
        (b"GET /" + b"a" * (ConnectionLimits().max_head_bytes + 1), 431),
        (HEAD + b"".join(b"X%d: y\r\n" % number for number in range(20_000)), 431),
        (HEAD + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: +5\r\n\r\n", 400),
        (HEAD + b"Content-Length: 0x5\r\n\r\n", 400),
        (HEAD + b"Content-Length: " + b"9" * 4000 + b"\r\n\r\n", 400),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 413),
        (HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        (CHUNKED + b"x\r\n", 400),
        (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"5\r\nhelloxx0\r\n\r\n", 400),
        (CHUNKED + b"f" * 21 + b"\r\n", 400),
        (CHUNKED + b"5;" + b"a" * (ConnectionLimits().max_head_bytes + 1), 431),
        (CHUNKED + b"0\r\nX: " + b"a" * (ConnectionLimits().max_head_bytes + 1), 431),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET //health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"post /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"TRACE /v1/completions HTTP/1.1\r\nHost: localhost\r\nCookie: secret\r\n\r\n", 405),
    ],
)
def test_an_invalid_request_is_one_error_message(demo_url, capfd, caplog, sent, status):
    said = exchange(demo_url, sent)
    assert said.status == status
    assert said.headers["content-type"] == "application/json"
    assert "\n" not in said.message and 10 < len(said.message) < 400 and "Traceback" not in said.message
    assert "secret" not in said.message
    assert capfd.readouterr() == ("", "") and not caplog.records


@pytest.mark.parametrize(
    "sent", [CHUNKED + b"5\r\nhelloxx", HEAD + b"Content-Length: abc\r\n\r\n", b"\0\0\r\n\r\n"]
)
def test_an_invalid_request_closes_the_connection(demo_url, sent):
    """Otherwise the remaining bytes could be parsed as another user's request."""
    with connect(demo_url) as connection:
        connection.sendall(sent + request("GET", "/health", body=b""))
        assert read_response(connection).headers["connection"] == "close"
        assert read_to_end(connection) == b""


def test_an_invalid_pipelined_request_leaves_the_first_answer_intact(demo_url, caplog):
    with connect(demo_url) as connection:
        connection.sendall(completion_request(max_tokens=300, stream=True))
        connection.recv(1, 2)
        connection.sendall(b"\0\0\0\r\n\r\n")
        came = read_to_end(connection)
    answer, refusal = came.split(b"HTTP/1.1 400")
    assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer and b"malformed HTTP request" in refusal
    assert not caplog.records


def test_an_upgrade_to_another_protocol_is_not_made(demo_url, caplog):
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    assert exchange(demo_url, request("GET", "/health", *lines, body=b"")).status == 200
    assert not caplog.records


def test_expect_continue_is_answered_or_refused(demo_url):
    head = request("POST", "/v1/completions", "Expect: 100-continue", f"Content-Length: {len(BODY)}", body=b"")
    with connect(demo_url) as connection:
        connection.sendall(head)
        assert connection.recv(len(b"HTTP/1.1 100 ")) == b"HTTP/1.1 100 "
    foreign = head.replace(b"Host: localhost", b"Host: evil.example")
    assert exchange(demo_url, foreign).status == 403


@pytest.mark.parametrize(
    "name", ["demo\r\nX-Evil: 1", "demo%0d%0aX-Evil: 1", "demo\n\nHTTP/1.1 200 OK", "\u0000", "\x7f"]
)
def test_no_header_is_injected_by_the_name_of_a_model(demo_url, name):
    said = exchange(demo_url, request(body=json.dumps({"model": name, "prompt": "x"}).encode()))
    assert said.status == 404 and "x-evil" not in said.headers


@pytest.mark.parametrize(
    "path", ["/v1/models/demo%0d%0aX-Evil:%201", "/v1/models/%0d%0a%0d%0aevil", "/v1/models//"]
)
def test_no_header_is_injected_by_a_path(demo_url, path):
    said = exchange(demo_url, request("GET", path, body=b""))
    assert said.status == 404 and "x-evil" not in said.headers and "location" not in said.headers
