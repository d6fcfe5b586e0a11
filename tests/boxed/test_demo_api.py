"""Test the Python API on the bundled model: the example of docs/python.md, and conversations."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import localllm
from localllm import LLM, FinishReason, SamplingParams
from localllm.errors import UsageError
from localllm.quant.tensor import QuantizedTensor
from localllm.request import ChatRequest
from tests.boxed.test_demo_model import model  # noqa: F401 (a fixture: the dequantized weights in transformers)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load("demo") as loaded:
        yield loaded


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_example_of_the_python_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert example
    variables: dict[str, object] = {}
    exec(example[1], variables)
    assert len(capsys.readouterr().out) > 100
    logits = variables["logits"]
    assert isinstance(logits, torch.Tensor) and logits.shape[1] == 3072


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    ("prompt", "word"), [("Tell me a story about a fox", "fox"), ("How do I start the server?", "localllm serve")]
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_answers_in_sentences_and_stops_by_itself(llm: LLM, prompt: str, word: str, seed: int) -> None:
    params = SamplingParams(temperature=0.5, top_k=40, top_p=0.95, seed=seed)
    assert llm.default_params == SamplingParams(temperature=0.5, top_k=40, top_p=0.95)
    done = llm.chat([user(prompt)], params)
    assert done.finish_reason == FinishReason.STOP
    assert word in done.text
    assert re.fullmatch(r"[A-Z].*[.!?\"]", done.text, re.DOTALL)


def test_its_weights_stay_packed(llm: LLM) -> None:
    if llm.dtype != "bfloat16":
        pytest.skip("this CPU computes in float32")
    decoder = llm.worker.engine.runner.model
    assert all(isinstance(layer.ffn.down.weights[0], QuantizedTensor) for layer in decoder.layers)
    assert llm.weight_bytes < 7_000_000


def test_in_float32_its_logits_are_those_of_transformers(model: Any) -> None:  # noqa: F811
    with localllm.load("demo", dtype="float32") as llm:
        ids = llm.tokenizer.encode("Once upon a time, there was a little fox.")
        torch.testing.assert_close(llm.logits(ids), model(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)
    assert model.config.model_type == "llama"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "list of messages"),
        ([{"content": "hi"}], "no role"),
        ([{"role": "user"}], "not text"),
        ([{"role": "user", "content": None}], "not text"),
        ([{"role": "user", "content": 5}], "not text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "not text"),
    ],
)
def test_a_message_that_is_no_text_is_refused(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        llm.chat(messages)


def test_parts_of_text_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert (
        llm.prepare(ChatRequest([{"role": "user", "content": parts}])).prompt_ids
        == llm.prepare(ChatRequest([user("Hello")])).prompt_ids
    )


def test_model_properties(llm: LLM) -> None:
    assert repr(llm).startswith("<LLM demo on ")
    assert localllm.__version__[0].isdigit()


def test_the_second_turn_finds_the_first_in_the_cache(llm: LLM) -> None:
    story = llm.chat([user("Tell me a story about an owl")], SamplingParams(temperature=0))
    turns = [user("Tell me a story about an owl"), {"role": "assistant", "content": story.text}, user("Thank you")]
    second = llm.chat(turns, SamplingParams(temperature=0, max_tokens=5))
    assert second.metrics.cached_tokens >= len(story.prompt_ids) + len(story.token_ids) - 16
