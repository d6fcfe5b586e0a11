"""Requests that the access rules refuse, sent raw to a real server."""

import http.client
import json
from contextlib import suppress
from urllib.parse import urlsplit

import httpx2
import pytest

from localllm.server.access import AccessPolicy, OriginRefused
from localllm.server.guard import ConnectionLimits

MOST_BODY = ConnectionLimits().max_body_bytes
BODY = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}).encode()


def ask(url, headers, body=BODY, method="POST", path="/v1/completions", chunked=False):
    """Send a request with exactly these headers; return status, headers and JSON of the response."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders(body, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


def named(host, *others):
    return [("Host", host), ("Content-Length", str(len(BODY))), *others]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "127.3.2.1", "[::1]:80"]
)
def test_names_of_this_machine_are_answered(demo_url, host):
    status, _, said = ask(demo_url, named(host))
    assert (status, said["object"]) == (200, "text_completion")


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example"],
        ["evil.example:11434"],
        ["localhost.evil.example"],
        ["127.0.0.1.evil.example"],
        ["192.168.0.7"],
        ["0.0.0.0"],
        ["localhost@evil.example"],
        ["localhost evil.example"],
        [""],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_foreign_host_name_is_refused(demo_url, hosts, path):
    status, _, said = ask(demo_url, named(*hosts), path=path)
    assert status == 403
    assert said["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil",
        "http://127.0.0.1.evil.example",
        "http://localhost@evil.example",
        "file://",
        "app://x/../y",
        "chrome-extension://abc",
    ],
)
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_a_page_of_another_origin_is_refused_and_may_read_nothing(demo_url, origin, method):
    status, headers, _ = ask(demo_url, named("localhost", ("Origin", origin)), method=method)
    assert status == 403
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://localhost",
        "http://127.0.0.1:5173",
        "http://[::1]:8080",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://1gq0a",
        "vscode-file://vscode-app",
    ],
)
def test_a_page_of_this_machine_or_of_one_of_its_programs_may_ask_and_read(demo_url, origin):
    asked = {"Origin": origin}
    answer = httpx2.get(f"{demo_url}/v1/models", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert answer.headers["vary"] == "Origin"
    before = httpx2.options(demo_url, headers={**asked, "Access-Control-Request-Method": "POST"})
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (204, origin)


@pytest.mark.parametrize(
    ("host", "client", "is_known"),
    [
        ("host.docker.internal:11434", "172.17.0.2", True),
        ("HOST.containers.internal", "127.0.0.1", True),
        ("host.docker.internal", "8.8.8.8", False),
        ("host.docker.internal", "", False),
        ("internal", "127.0.0.1", False),
        ("internal.evil.example", "127.0.0.1", False),
        ("evil.example", "127.0.0.1", False),
    ],
)
def test_containers_may_use_private_host_names(host, client, is_known):
    headers = [(b"host", host.encode())]
    if is_known:
        assert AccessPolicy().check_host(headers, client) == host
    else:
        with pytest.raises(OriginRefused):
            AccessPolicy().check_host(headers, client)


def test_head_and_options_are_answered_everywhere(demo_url):
    for path in (
        "/v1/models",
        "/v1/models/demo",
        "/health",
        "/api/tags",
        "/api/ps",
        "/metrics",
        "/openapi.json",
        "/",
    ):
        got, head = httpx2.get(demo_url + path), httpx2.head(demo_url + path)
        assert (got.status_code, head.status_code, head.content) == (200, 200, b"") and got.content, path
        assert head.headers["content-type"] == got.headers["content-type"]
        options = httpx2.options(demo_url + path)
        assert options.status_code == 204 and {"GET", "HEAD"} <= set(options.headers["allow"].split(", ")), path
    options = httpx2.options(f"{demo_url}/v1/chat/completions")
    assert (options.status_code, options.headers["allow"]) == (204, "POST, OPTIONS")
    assert httpx2.options(f"{demo_url}/v1/responses/x").headers["allow"] == "DELETE, GET, HEAD, OPTIONS"
    assert (
        httpx2.options(f"{demo_url}/nowhere").status_code == httpx2.head(f"{demo_url}/nowhere").status_code == 404
    )


def test_the_servers_own_page_may_ask(demo_url):
    host = urlsplit(demo_url).netloc
    assert ask(demo_url, named(host, ("Origin", demo_url)))[0] == 200


def test_a_body_that_announces_to_be_too_large_is_refused_unread(demo_url):
    headers = [("Host", "localhost"), ("Content-Length", str(MOST_BODY + 1))]
    status, _, said = ask(demo_url, headers, body=b"{")
    assert status == 413 and "16 MiB" in said["error"]["message"]


def test_a_body_without_a_length_is_counted(demo_url):
    piece = b" " * 2**20
    headers = [("Host", "localhost"), ("Transfer-Encoding", "chunked")]
    sent = 0

    def endless():
        nonlocal sent
        while True:
            sent += len(piece)
            yield piece

    with suppress(BrokenPipeError, ConnectionResetError):  # it hung up, and its answer was lost
        assert ask(demo_url, headers, body=endless(), chunked=True)[0] == 413
    assert MOST_BODY <= sent < 4 * MOST_BODY


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"model": NaN}',
        b"[" * 100_000,
        b'{"model": 1, "model": 1}',
        b"\xff",
        b'{"model": "\\ud800"}',
    ],
)
def test_a_file_without_a_json_object_is_rejected(demo_url, body):
    status, _, said = ask(demo_url, [("Host", "localhost"), ("Content-Length", str(len(body)))], body)
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")


def test_unknown_routes_and_methods_have_the_same_error_form(demo_url):
    assert ask(demo_url, named("localhost"), path="/v1/audio/speech")[0] == 404
    status, headers, said = ask(demo_url, [("Host", "localhost")], None, method="GET")
    assert status == 405 and headers["Allow"] == "POST"
    assert said["error"]["message"] == "/v1/completions does not accept GET; send POST"
