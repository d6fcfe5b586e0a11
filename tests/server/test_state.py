"""The state of a conversation moves from one server to another, which continues without computing it again."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import localllm
from localllm import LLM
from localllm.server.access import AccessPolicy, key_digest
from tests.server.conftest import serving

KEYS = ("first-key-of-sixteen", "second-key-of-sixteen")
BEARER = {"Authorization": f"Bearer {KEYS[0]}"}
STORY = "Once upon a time there was a little fox who lived in the green forest. " * 5


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Yield the URL of `localllm serve demo` with a key."""
    (folder / "keys").write_text(KEYS[0])
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0"]
    command += ["--api-key-file", str(folder / "keys")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            yield process.stderr.readline().removeprefix("listening on ").strip()
        finally:
            process.kill()


def chat(url: str, messages: list[dict[str, str]]) -> tuple[str, int]:
    """Answer, and its cached tokens."""
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, headers=BEARER, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["message"]["content"], usage["cached_tokens"]


def export(url: str, status: int = 200, key: str = KEYS[0], params: Any = None, **body: Any) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.request("GET", f"{url}/localllm/state", params=params, json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer


def send(url: str, content: bytes, status: int = 200, key: str = KEYS[0]) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.post(f"{url}/localllm/state", content=content, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load("demo") as llm:
        yield llm


def policy(*keys: str, shares_cache: bool = False) -> AccessPolicy:
    return AccessPolicy(keys=frozenset(map(key_digest, keys)), shares_cache=shares_cache)


def test_a_conversation_continues_on_another_server(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, policy(KEYS[0])) as first, serve(tmp_path) as second:
        messages = [{"role": "user", "content": STORY}]
        told, cached = chat(first, messages)
        assert cached == 0
        messages += [{"role": "assistant", "content": told}, {"role": "user", "content": "And then?"}]
        state = export(first, messages=messages[:2])
        received = send(second, state.content)
        assert received["bytes"] == len(state.content) and received["tokens"] > 64
        here, there = chat(first, messages), chat(second, messages)
        assert there[0] == here[0]
        assert there[1] == received["tokens"]
        with httpx2.stream("GET", f"{first}/localllm/state", params={"slot": 0}, headers=BEARER) as stream:
            answer = httpx2.post(f"{second}/localllm/state", content=stream.iter_bytes(), headers=BEARER)
        assert answer.json()["tokens"] > received["tokens"]


def test_only_keys_move_states(llm: LLM) -> None:
    with serving(llm) as url:
        refused = export(url, 403, tokens=[5]).json()["error"]
        assert "needs an API key" in refused["message"]
        send(url, b"", 403)
    with serving(llm, policy(*KEYS)) as url:
        assert httpx2.get(f"{url}/localllm/state", params={"slot": 0}).status_code == 401
        tokens = llm.tokenizer.encode(STORY)
        httpx2.post(
            f"{url}/completion", json={"prompt": tokens, "n_predict": 1}, headers=BEARER, timeout=60
        ).raise_for_status()
        state = export(url, tokens=tokens).content
        export(url, 400, key=KEYS[1], tokens=tokens)
        export(url, 400, key=KEYS[1], params={"slot": 0})
        assert send(url, state, key=KEYS[1])["tokens"] == len(tokens) // 16 * 16
        assert export(url, key=KEYS[1], prompt=STORY).content
    with serving(llm, policy(*KEYS, shares_cache=True)) as url:
        assert "--cache-shared" in send(url, state, 403)["error"]["message"]
    with serving(llm, policy(KEYS[0], shares_cache=True)) as url:
        assert send(url, state)["tokens"] > 0


def test_what_is_no_state_is_refused(llm: LLM) -> None:
    with serving(llm, policy(KEYS[0])) as url:
        tokens = llm.tokenizer.encode(STORY)
        httpx2.post(
            f"{url}/completion", json={"prompt": tokens, "n_predict": 1}, headers=BEARER, timeout=60
        ).raise_for_status()
        state = export(url, tokens=tokens).content
        for body in ({}, {"tokens": tokens, "prompt": STORY}, {"tokens": ["a"]}, {"messages": [{"role": "x"}]}):
            export(url, 400, **body)
        assert "none of these tokens" in export(url, 400, tokens=[7] * 64).json()["error"]["message"]
        for wrong in (b"", state[:-1], state[1:], state + state, state[:500] + b"x" + state[501:]):
            send(url, wrong, 400)
        assert llm.stats().used_blocks == 0
        assert send(url, state)["bytes"] == len(state)
    with localllm.load("demo", dtype="float32") as other, serving(other, policy(KEYS[0])) as url:
        assert "--dtype" in send(url, state, 400)["error"]["message"]
