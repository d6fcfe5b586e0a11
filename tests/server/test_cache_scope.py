"""Requests with different API keys share no cached prompts, unless the server allows it: the speed of an answer
would reveal what others sent.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import localllm
from localllm.llm.llm import LLM
from localllm.server.access import AccessPolicy
from localllm.tui.top_board import _model_snapshot, cache_lines
from tests.server.conftest import serving

KEYS = ("first-key-of-sixteen", "second-key-of-sixteen")
PROMPT = "Once upon a time there was a little fox who lived in the green forest. " * 10


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with localllm.load("demo", cache_dir=tmp_path) as llm:
        yield llm


def policy(*, shares_cache: bool) -> AccessPolicy:
    return AccessPolicy(
        keys=frozenset(hashlib.sha256(key.encode()).digest() for key in KEYS), shares_cache=shares_cache
    )


def cached_tokens(url: str, key: str) -> int:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
    answer = httpx2.post(
        f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("shares_cache", [False, True])
def test_keys_share_prompts_only_if_asked_to(llm: LLM, tmp_path: Path, shares_cache: bool) -> None:
    with serving(llm, policy(shares_cache=shares_cache)) as url:
        assert cached_tokens(url, KEYS[0]) == 0
        assert cached_tokens(url, KEYS[0]) > 100
        assert (cached_tokens(url, KEYS[1]) > 100) is shares_cache
        assert cached_tokens(url, KEYS[1]) > 100
    llm.close()
    access = policy(shares_cache=shares_cache)
    with localllm.load("demo", cache_dir=tmp_path) as again, serving(again, access) as url:
        assert cached_tokens(url, KEYS[1]) > 100
        samples = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
        values = dict(line.rsplit(" ", 1) for line in samples.splitlines() if not line.startswith("#"))
        assert float(values['localllm_prefix_disk_tokens_total{model="demo"}']) > 100
        assert float(values['localllm_kv_disk_read_bytes_total{model="demo"}']) > 100_000
        assert float(values['localllm_kv_host_to_device_bytes_total{model="demo"}']) > 100_000
        assert float(values['localllm_kv_host_to_device_seconds_total{model="demo"}']) > 0
        top = httpx2.get(f"{url}/localllm/top", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
        assert "disk to host in" in cache_lines(_model_snapshot(top["models"][0]))[-1]
