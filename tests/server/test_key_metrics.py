"""Tokens and cost of each API key in `/metrics`."""

import httpx2
import pytest

from localllm.errors import UsageError
from localllm.llm.llm import LLM
from localllm.server.access import MAX_KEY_LABELS, OTHER_KEYS_LABEL, key_digest, make_access_policy
from localllm.server.prometheus import TokenPrice
from tests.server.conftest import serving

ALICE, NAMELESS = "key-of-alice-16-chars", "another-key-16-chars"


def samples(url: str, key: str | None = None) -> dict[str, float]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    text = httpx2.get(f"{url}/metrics", headers=headers).text
    assert ALICE not in text and NAMELESS not in text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def complete(url: str, key: str | None, tokens: int) -> int:
    """Return the prompt tokens of an answer."""
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


def test_tokens_and_cost_by_key(demo: LLM) -> None:
    access = make_access_policy("127.0.0.1", [f"alice: {ALICE}", NAMELESS])
    with serving(demo, access, token_price=TokenPrice.parse("1000,2000")) as url:
        prompt = complete(url, ALICE, 5) + complete(url, ALICE, 7)
        complete(url, NAMELESS, 3)
        assert httpx2.post(f"{url}/v1/completions", headers={"Authorization": "Bearer wrong"}).status_code == 401
        found = samples(url, ALICE)
    label = '{key="alice",model="demo"}'
    assert found[f"localllm_key_answers_total{label}"] == 2
    assert found[f"localllm_key_prompt_tokens_total{label}"] == prompt
    assert found[f"localllm_key_output_tokens_total{label}"] == 12
    assert found[f"localllm_key_cost_total{label}"] == pytest.approx(prompt * 1e-3 + 12 * 2e-3)
    other = access.key_label(key_digest(NAMELESS))
    assert other.startswith("key-") and len(other) == 12
    assert found[f'localllm_key_output_tokens_total{{key="{other}",model="demo"}}'] == 3
    assert sum(name.startswith("localllm_key_answers_total") for name in found) == 2


def test_a_server_without_keys_and_prices(demo: LLM) -> None:
    with serving(demo) as url:
        complete(url, None, 4)
        found = samples(url)
    assert found['localllm_key_output_tokens_total{key="none",model="demo"}'] == 4
    assert not any("key_cost" in name for name in found)


def test_labels_are_bounded_and_stable() -> None:
    keys = [f"key-number-{i:04d}-of-many" for i in range(MAX_KEY_LABELS + 50)]
    named = [*keys[:-1], f"zoe: {keys[-1]}"]
    access = make_access_policy("127.0.0.1", named)
    labels = [access.key_label(key_digest(key)) for key in keys]
    assert len(set(labels)) == MAX_KEY_LABELS + 1 and OTHER_KEYS_LABEL in labels
    assert labels[-1] == "zoe"
    assert labels == [make_access_policy("127.0.0.1", named[::-1]).key_label(key_digest(key)) for key in keys]


def test_keys_of_one_name_share_a_label() -> None:
    access = make_access_policy("127.0.0.1", [f"alice: {ALICE}", f"alice: {NAMELESS}"])
    assert {access.key_label(key) for key in access.keys} == {"alice"}


def test_prices() -> None:
    price = TokenPrice.parse("1,2,0.25")
    assert price.cost(1_000_000, 400_000, 500_000) == pytest.approx(0.6 + 0.1 + 1)
    assert TokenPrice.parse("1,2").cost(1_000_000, 400_000, 0) == pytest.approx(1)
    for text in ("1", "1,2,3,4", "1,-2", "a,b", "inf,1", ""):
        with pytest.raises(UsageError, match="--token-price"):
            TokenPrice.parse(text)
