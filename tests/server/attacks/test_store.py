"""Ollama's store routes with names outside the store."""

import json

import pytest

from tests.server.attacks.wire import exchange, request

PATHS = ("/etc", "/etc/passwd", "../../../etc/passwd", "~/.ssh", "tests/server", "x\0", "\n", "a/" * 2000)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path[:20]))
@pytest.mark.parametrize(
    ("method", "call", "body"),
    [
        ("POST", "/api/generate", {"model": "NAME", "prompt": "x"}),
        ("POST", "/api/chat", {"model": "NAME", "messages": []}),
        ("POST", "/api/show", {"model": "NAME"}),
        ("DELETE", "/api/delete", {"model": "NAME"}),
        ("POST", "/api/copy", {"source": "demo", "destination": "NAME"}),
        ("POST", "/api/copy", {"source": "NAME", "destination": "stolen"}),
        ("POST", "/api/create", {"model": "stolen", "from": "NAME", "stream": False}),
        ("POST", "/api/create", {"model": "NAME", "from": "demo", "stream": False}),
        ("POST", "/api/create", {"model": "stolen", "files": {"NAME": "sha256:" + "0" * 64}, "stream": False}),
        ("POST", "/api/create", {"model": "stolen", "files": {"model.gguf": "NAME"}, "stream": False}),
    ],
)
def test_no_name_leaves_the_store(demo_url, path, method, call, body):
    sent = json.dumps(body).replace("NAME", json.dumps(path)[1:-1]).encode()
    said = exchange(demo_url, request(method, call, body=sent))
    assert said.status in (400, 404, 501), said
    assert b"root:" not in said.body and b"Traceback" not in said.body


@pytest.mark.parametrize("digest", ["..%2f..%2fetc%2fpasswd", "sha256:..%2fx", "sha256:" + "g" * 64, "sha256:"])
@pytest.mark.parametrize("method", ["HEAD", "POST"])
def test_no_digest_becomes_a_path(demo_url, digest, method):
    said = exchange(
        demo_url, request(method, f"/api/blobs/{digest}", body=b"x" if method == "POST" else b""), method
    )
    assert said.status in (400, 404)
