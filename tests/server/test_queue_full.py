"""A full queue in every API: 503 with Retry-After, before any part of an answer is sent."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.request import ChatRequest
from localllm.sampling import params_to_json
from tests.server.conftest import serving

SHORT = SamplingParams(temperature=0, max_tokens=4)
ROOM = 2  # of the queue
OWN: dict[str, Any] = {"params": params_to_json(SHORT), "tools": None, "template_arguments": {}}
USER = [{"role": "user", "content": "Once"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"prompt": ["Once", "One day", "A"], "max_tokens": 4, "stream": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "stream": True}),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 16}),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 16, "stream": True}),
    ("/v1/messages", {"messages": USER, "max_tokens": 4}),
    ("/v1/messages", {"messages": USER, "max_tokens": 4, "stream": True}),
    ("/api/generate", {"prompt": "Once", "stream": False}),
    ("/api/generate", {"prompt": "Once"}),
    ("/api/chat", {"messages": USER}),
    ("/localllm/answer", {"prompt": "Once", **OWN}),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load("demo", context=256, max_queue=ROOM) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with serving(llm) as url:
        yield url


@contextmanager
def waiting(llm: LLM, count: int) -> Iterator[None]:
    """Keep this many requests waiting while the engine's thread is blocked."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(20)

    thread = threading.Thread(target=llm.worker.call, args=(wait,))
    thread.start()
    assert begun.wait(60)
    with ExitStack() as streams:
        for _ in range(count):
            streams.callback(llm.submit(llm.prepare(ChatRequest("Once", SHORT))).close)
        try:
            yield
        finally:
            go_on.set()
            thread.join()


def test_a_full_queue_is_503_before_any_answer(llm: LLM, url: str) -> None:
    with waiting(llm, ROOM):
        for path, asked in ASKED:
            answer = httpx2.post(f"{url}{path}", json={"model": "demo", **asked})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5"), path
            assert answer.json()["error"] and "2 requests are waiting" in answer.text, path


def test_several_answers_are_refused_together(llm: LLM, url: str) -> None:
    before = llm.stats().cancelled
    with waiting(llm, ROOM - 1):
        asked = {"model": "demo", "prompt": ["Once", "One day"], "max_tokens": 200}
        assert httpx2.post(f"{url}/v1/completions", json=asked).status_code == 503
    llm.worker.call(lambda: None)
    assert llm.stats().cancelled - before >= 1
    assert not [one for one in llm.worker.outputs if one.limit > 100]
