"""Ollama's API byte by byte: statuses, bodies and shapes that clients in other languages rely on."""

import hashlib
import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from localllm import LLM
from localllm.hub.uploaded_blobs import blob_file

Ask = Callable[..., tuple[int, str, bytes]]
CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
HI = [{"role": "user", "content": "Hi"}]
TOOK = [
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def ask(demo_url: str) -> Iterator[Ask]:
    connection = http.client.HTTPConnection(urlsplit(demo_url).netloc, timeout=60)

    def ask(method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, str, bytes]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type") or "", answer.read()

    yield ask
    connection.close()


def test_the_root_says_ollama_is_running(ask: Ask) -> None:
    assert ask("GET", "/") == (200, "text/plain; charset=utf-8", b"Ollama is running")
    assert ask("HEAD", "/")[::2] == (200, b"")
    status, kind, body = ask("GET", "/api/version")
    assert status == 200 and kind == "application/json" and body == b'{"version":"0.33.0"}'
    assert ask("HEAD", "/api/version")[0] == ask("HEAD", "/api/tags")[0] == 200


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_lines_of_a_stream_have_the_shape_of_ollamas(ask: Ask, path: str) -> None:
    asked = {"messages": HI} if path == "/api/chat" else {"prompt": "Hi"}
    status, kind, body = ask("POST", path, {"model": "demo", **asked, "options": {"num_predict": 3}})
    assert status == 200 and kind == "application/x-ndjson"
    assert body.endswith(b"}\n") and b"\n\n" not in body
    *pieces, last = map(json.loads, body.splitlines())
    said = "message" if path == "/api/chat" else "response"
    assert all(list(piece) == ["model", "created_at", said, "done"] for piece in pieces)
    ended = [
        "model",
        "created_at",
        said,
        "done",
        "done_reason",
        *(["context"] if said == "response" else []),
        *TOOK,
    ]
    assert list(last) == ended
    assert all(CREATED.fullmatch(piece["created_at"]) and piece["model"] == "demo" for piece in [*pieces, last])
    assert all(type(last[name]) is int for name in TOOK)
    if said == "message":
        assert all(list(piece["message"]) == ["role", "content"] for piece in [*pieces, last])
        assert last["message"] == {"role": "assistant", "content": ""}


def test_an_unstreamed_answer_is_one_object(ask: Ask) -> None:
    asked = {"model": "demo", "messages": HI, "stream": False, "options": {"num_predict": 3}}
    status, kind, body = ask("POST", "/api/chat", asked)
    assert status == 200 and kind == "application/json"
    assert list(json.loads(body)) == ["model", "created_at", "message", "done", "done_reason", *TOOK]


def test_loading_and_unloading_are_one_object(ask: Ask) -> None:
    loaded = json.loads(ask("POST", "/api/generate", {"model": "demo"})[2])
    assert loaded.pop("created_at") and loaded == {
        "model": "demo",
        "response": "",
        "done": True,
        "done_reason": "load",
    }
    loaded = json.loads(ask("POST", "/api/chat", {"model": "demo", "messages": []})[2])
    message = {"role": "assistant", "content": ""}
    assert loaded.pop("created_at")
    assert loaded == {"model": "demo", "message": message, "done": True, "done_reason": "load"}


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/api/chat", b"", 400, "missing request body"),
        ("/api/generate", b"{", 400, "not valid JSON"),
        ("/api/chat", {"model": "none", "messages": HI}, 404, "model 'none' not found"),
        ("/api/generate", {"model": "none", "prompt": "a"}, 404, "model 'none' not found"),
        ("/api/chat", {"model": "demo", "messages": HI, "top_logprobs": 21}, 400, "must be between 0 and 20"),
        ("/api/chat", {"model": "demo", "messages": "Hi"}, 400, "messages has the wrong type"),
        ("/api/chat", {"model": "demo", "messages": [{"role": "cat", "content": "a"}]}, 400, "invalid role: cat"),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "images": ["a"]}]}, 400, "text only"),
        ("/api/chat", {"model": "demo", "messages": HI, "format": 3}, 400, "invalid format: 3"),
        ("/api/chat", {"model": "demo", "messages": HI, "format": "xml"}, 400, 'invalid format: "xml"'),
        ("/api/chat", {"model": "demo", "messages": HI, "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/chat", {"model": "demo", "messages": HI, "think": "very"}, 400, "invalid think value"),
        ("/api/chat", {"model": "/etc/passwd", "messages": HI}, 404, "not found"),
        ("/api/generate", {"model": "demo", "prompt": "a", "raw": True, "system": "b"}, 400, "raw mode does not"),
        ("/api/generate", {"model": "demo", "prompt": "a", "context": [10**9]}, 400, "not a token of this model"),
        ("/api/generate", {"model": "demo", "prompt": "a", "options": {"num_predict": "x"}}, 400, "num_predict"),
        ("/api/show", {}, 400, "model is required"),
        ("/api/show", {"model": "../demo"}, 404, "not found"),
        ("/api/copy", {"source": "demo", "destination": "../../x"}, 400, "is not a valid name"),
        ("/api/pull", {"model": "/etc"}, 400, "invalid model name"),
        ("/api/create", {"model": "x", "modelfile": "FROM demo"}, 400, "modelfile is not supported"),
        ("/api/push", {"model": "demo"}, 501, "push is not supported"),
        ("/api/nothing", {}, 404, "there is no route"),
    ],
)
def test_invalid_input_is_one_error(ask: Ask, path: str, body: Any, status: int, told: str) -> None:
    found, kind, said = ask("POST", path, body)
    assert found == status and kind == "application/json"
    error = json.loads(said)
    assert list(error) == ["error"] and told in error["error"]


def test_the_wrong_method_is_reported(ask: Ask) -> None:
    assert ask("GET", "/api/chat")[0] == ask("POST", "/api/delete", {"model": "demo"})[0] == 405


def test_blobs_are_stored_if_their_digest_matches(ask: Ask) -> None:
    content = b"x" * 100_000
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    other = "sha256:" + "0" * 64
    assert ask("HEAD", f"/api/blobs/{digest}")[0] == 404
    assert ask("POST", f"/api/blobs/{other}", content)[0] == 400
    assert "digest mismatch" in json.loads(ask("POST", f"/api/blobs/{other}", content)[2])["error"]
    assert [path.name for path in blob_file(other).parent.iterdir()] == []
    assert ask("POST", f"/api/blobs/{digest}", content)[::2] == (201, b"")
    assert ask("HEAD", f"/api/blobs/{digest}")[0] == ask("POST", f"/api/blobs/{digest}", content)[0] == 200
    assert blob_file(digest).read_bytes() == content
    for wrong in ("sha256:..%2F..%2Fx", "md5:00", "sha256:" + "g" * 64):
        assert ask("POST", f"/api/blobs/{wrong}", content)[0] in (400, 404)


def test_the_answer_to_a_client_that_leaves_is_cancelled(ask: Ask, demo: LLM, demo_url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(demo_url).netloc, timeout=60)
    asked = {
        "model": "demo",
        "prompt": "Once upon a time",
        "raw": True,
        "options": {"num_predict": 900, "seed": 1},
    }
    connection.request("POST", "/api/generate", json.dumps(asked))
    answer = connection.getresponse()
    answer.readline()
    answer.close()
    connection.close()
    assert ask("GET", "/api/ps")[0] == 200
    for _ in range(100):
        if not demo.worker.engine.scheduler.running:
            break
        ask("GET", "/api/version")
    assert not demo.worker.engine.scheduler.running
