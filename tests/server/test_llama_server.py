"""The routes of llama.cpp's server as its client programs use them."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.request import ChatRequest
from tests.scripted import write_scripted
from tests.server.conftest import serving

GREEDY = {"temperature": 0, "n_predict": 8}


def post(url: str, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx2.post(url + path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_text_is_continued(demo_url: str, demo: LLM, path: str) -> None:
    expected = demo.generate("Once upon", SamplingParams(temperature=0, max_tokens=8))
    told = post(demo_url, path, prompt="Once upon", return_tokens=True, cache_prompt=True, id_slot=0, **GREEDY)
    assert told["content"] == expected.text and tuple(told["tokens"]) == expected.token_ids
    assert (told["stop"], told["stop_type"], told["model"]) == (True, "limit", "demo")
    assert (told["tokens_predicted"], told["tokens_evaluated"]) == (8, len(expected.prompt_ids))
    assert told["generation_settings"]["temperature"] == 0 and told["timings"]["predicted_n"] == 8
    stopped = post(demo_url, path, prompt="Once upon", stop=[expected.text[-3:]], **GREEDY)
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", expected.text[-3:])
    several = post(demo_url, path, prompt=[list(expected.prompt_ids)] * 2, **GREEDY)
    assert [one["content"] for one in several] == [expected.text] * 2
    assert [one["index"] for one in several] == [0, 1]


def test_a_text_is_streamed(demo_url: str) -> None:
    whole = post(demo_url, "/completion", prompt="Once upon", n_probs=2, **GREEDY)
    body = {"prompt": "Once upon", "n_probs": 2, "stream": True, **GREEDY}
    with httpx2.stream("POST", f"{demo_url}/completion", json=body) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    told = [entry for event in events for entry in event["completion_probabilities"]]
    assert told == whole["completion_probabilities"] and len(told) == 8
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in told)


def test_grammars_and_biases_apply(demo_url: str, demo: LLM) -> None:
    assert post(demo_url, "/completion", prompt="x", grammar='root ::= "ab"', **GREEDY)["content"] == "ab"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    told = post(demo_url, "/completion", prompt="x", json_schema=schema, temperature=0, n_predict=40)
    assert json.loads(told["content"]) == {"a": 1}
    free = post(demo_url, "/completion", prompt="Once upon", return_tokens=True, **GREEDY)
    bias = [[free["tokens"][0], False]]
    other = post(demo_url, "/completion", prompt="Once upon", logit_bias=bias, return_tokens=True, **GREEDY)
    assert other["tokens"][0] != free["tokens"][0]
    assert post(demo_url, "/completion", 400, prompt="x", logit_bias=3)["error"]["param"] == "logit_bias"


def test_defaults_sent_by_its_own_page_change_nothing(demo_url: str) -> None:
    fields = {
        "samplers": ["top_k"],
        "dry_multiplier": 0,
        "xtc_probability": 0,
        "typical_p": 1,
        "dynatemp_range": 0,
    }
    body = {"prompt": "Once upon", **GREEDY, **fields}
    answer = httpx2.post(f"{demo_url}/completion", json=body)
    assert answer.status_code == 200 and "x-localllm-ignored" not in answer.headers
    named = httpx2.post(f"{demo_url}/completion", json={**body, "dry_multiplier": 0.8})
    assert named.headers["x-localllm-ignored"] == "dry_multiplier;changes-answer"


def test_tokens_and_templates(demo_url: str, demo: LLM) -> None:
    ids = demo.tokenizer.encode("Hello there", special=False)
    assert post(demo_url, "/tokenize", content="Hello there")["tokens"] == ids
    assert post(demo_url, "/tokenize", content="Hello there", add_special=True)["tokens"] == demo.tokenizer.encode(
        "Hello there"
    )
    pieces = post(demo_url, "/tokenize", content="Hello there", with_pieces=True)["tokens"]
    assert "".join(one["piece"] for one in pieces) == "Hello there"
    control = next(iter(demo.tokenizer.control_tokens))
    assert len(post(demo_url, "/tokenize", content=control)["tokens"]) == 1
    assert len(post(demo_url, "/tokenize", content=control, parse_special=False)["tokens"]) > 1
    assert post(demo_url, "/detokenize", tokens=ids)["content"] == "Hello there"
    assert post(demo_url, "/detokenize", 400, tokens=[10**6])["error"]["param"] == "tokens"
    messages = [{"role": "user", "content": "Hi"}]
    prompt = post(demo_url, "/apply-template", messages=messages)["prompt"]
    assert prompt == demo.tokenizer.decode(demo.encode(ChatRequest(messages)), skip_special=False)


def test_vectors(demo_url: str, demo: LLM) -> None:
    expected = demo.embed(["a cat", "a dog"]).vectors.tolist()
    for path, field in (("/embedding", "content"), ("/embeddings", "input")):
        told = post(demo_url, path, **{field: ["a cat", "a dog"]})
        assert [one["index"] for one in told] == [0, 1]
        for one, vector in zip(told, expected, strict=True):
            assert one["embedding"][0] == pytest.approx(vector, abs=1e-5)
    assert post(demo_url, "/embedding", 400)["error"]["param"] == "content"


def test_server_properties(demo_url: str, demo: LLM) -> None:
    props = httpx2.get(f"{demo_url}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == demo.context and props["model_alias"] == "demo"
    assert props["chat_template"] and str(demo.path) not in json.dumps(props)
    slots = httpx2.get(f"{demo_url}/slots", params={"model": "demo"}).json()
    assert slots[0]["id"] == 0 and not slots[0]["is_processing"] and props["total_slots"] == len(slots)
    assert httpx2.get(f"{demo_url}/models").json() == httpx2.get(f"{demo_url}/v1/models").json()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert post(demo_url, "/chat/completions", **chat)["object"] == "chat.completion"
    for path in ("/rerank", "/v1/rerank"):
        refused = post(demo_url, path, 501, query="a", documents=["b"])
        assert "request embeddings" in refused["error"]["message"]


def test_a_gap_is_filled(tmp_path: Path, demo_url: str) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    folder = write_scripted(tmp_path / "coder", ("x", *marks), special=marks)
    with localllm.load(folder, device="cpu") as llm, serving(llm) as url:
        asked = {"input_prefix": "def f(", "prompt": "x", "input_suffix": "\n", "n_predict": 2}
        told = post(url, "/infill", **asked)
        by_openai = post(
            url, "/v1/completions", model=llm.name, prompt="def f(x", suffix="\n", max_tokens=2, temperature=0
        )
        assert told["tokens_evaluated"] == by_openai["usage"]["prompt_tokens"]
        assert post(url, "/infill", input_prefix="def f(", n_predict=2)["tokens_predicted"]
    refused = httpx2.post(f"{demo_url}/infill", json=asked)
    assert refused.status_code >= 400 and "does not support infilling" in refused.json()["error"]["message"]
