"""A model that `localllm.load` puts on a lagging device answers as on the CPU: the loader's threads, the plan,
warming up, captures, the engine's thread, grammars, speculation, embeddings and a changed context."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import localllm
from localllm import LLM, SamplingParams
from localllm.benchmark.gpu import self_test
from localllm.benchmark.gpu.generated import TINY
from localllm.checkpoint.matrices import PackedMatrix
from localllm.hardware import measure
from localllm.plan import measured
from localllm.quant.packing import INT8
from localllm.request import Grammar, GrammarKind
from localllm.settings import Settings
from tests.lagging.device import LaggingDevice
from tests.lagging.kernels import use_references
from tests.shared import shared

GREEDY = SamplingParams(temperature=0, max_tokens=10)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
TOGETHER = [
    ("Hello", GREEDY),
    ("Once upon a time", dataclasses.replace(GREEDY, logprobs=2)),
    ("The cat", dataclasses.replace(GREEDY, temperature=0.8, seed=3, top_p=0.9)),
    ("A dog", dataclasses.replace(GREEDY, prompt_logprobs=1, repetition_penalty=1.2)),
    ("Give", dataclasses.replace(GREEDY, grammar=GRAMMAR, max_tokens=30)),
]
REPEATING = "one two three four five six one two three four"


@contextmanager
def loaded(name: str | Path, device: str, home: Path, **options: Any):
    settings = dataclasses.replace(Settings.from_environment(), home=home)
    with localllm.load(name, device=device, settings=settings, context=256, **options) as llm:
        yield llm


def answer_together(llm: LLM) -> list[list[int]]:
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        return [list(done.token_ids) for done in pool.map(lambda each: llm.generate(*each), TOGETHER)]


def use_everything(llm: LLM) -> list[Any]:
    drafted = llm.generate(REPEATING, dataclasses.replace(GREEDY, max_tokens=24))
    results: list[Any] = [answer_together(llm), list(drafted.token_ids)]
    results.append(llm.embed(["Hello world", "The cat sat on the mat"]).vectors.round(2).tolist())
    stream = llm.stream("Hello", dataclasses.replace(GREEDY, max_tokens=20))
    text = "".join(next(stream).text for _ in range(5))
    llm.resize(128)
    results.append(text + "".join(event.text for event in stream))
    cancelled = llm.stream("Hello", dataclasses.replace(GREEDY, max_tokens=60))
    next(cancelled)
    cancelled.close()
    return [*results, answer_together(llm)]


@pytest.mark.slow
def test_answers_and_grammars_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("demo", "cpu", tmp_path, dtype="float32") as llm:
        expected = answer_together(llm)
    use_references(monkeypatch)
    with LaggingDevice(), loaded("demo", "cuda", tmp_path, dtype="float32") as llm:
        assert llm.worker.engine.device.type == "cuda" and not llm.without_graphs
        assert answer_together(llm) == expected
        graphs = llm.worker.engine.runner.graphs
        assert graphs and graphs.captured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timing", "options"),
    [
        ("demo", None, {}),
        ("demo", 0, {"kv_dtype": "int8"}),
        ("demo", 1, {"kv_dtype": "fp8"}),
        ("demo", 2, {"draft_model": "demo"}),
        ("stories260K", 3, {}),
        ("gguf/model-q4_k_m.gguf", None, {}),
        ("gguf/model-q8_0.gguf", 4, {}),
        ("gguf/model-iq4_nl.gguf", 5, {}),
    ],
    ids=str,
)
def test_everything_gives_the_results_of_the_cpu(
    name: str, timing: int | None, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = name if name == "demo" else shared(name)
    with loaded(model, "cpu", tmp_path, dtype="float32", **options) as llm:
        expected = use_everything(llm)
    use_references(monkeypatch)
    with LaggingDevice(timing), loaded(model, "cuda", tmp_path, dtype="float32", **options) as llm:
        assert use_everything(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("timing", [None, 0])
def test_prompts_on_the_disk_give_the_answers_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timing: int | None
) -> None:
    """Blocks are copied to the host while the device lags, and back into blocks that it may still be writing."""
    prompts = [f"{word} upon a time there was a little fox in the wood. " * 8 for word in ("Once", "Twice")]

    def answers(llm: LLM) -> list[list[int]]:
        return [list(llm.generate(prompt, GREEDY).token_ids) for prompt in prompts]

    with loaded("demo", "cpu", tmp_path, dtype="float32") as llm:
        expected = answers(llm)
    use_references(monkeypatch)
    for disk_tokens in (0, 100):
        options = {"dtype": "float32", "cache_dir": tmp_path / "cache"}
        with LaggingDevice(timing), loaded("demo", "cuda", tmp_path, **options) as llm:
            assert answers(llm) == expected
            assert llm.stats().disk_tokens >= disk_tokens


@pytest.mark.slow
def test_the_self_test_measures_captured_products_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    tiny = self_test.layers(TINY, 1, vocab_size=320)
    monkeypatch.setattr(self_test, "CHECKS", (("Llama", tiny, "bf16", None),))
    monkeypatch.setattr(self_test, "PRODUCTS", ("bf16",))
    monkeypatch.setattr(self_test, "MEASURED", (("8B", "bf16"),))
    # Each sequence costs hundreds of calls here; tests/benchmark/test_gpu_self_test.py has steps of many.
    monkeypatch.setattr(self_test, "PROMPTS", (5, 70))
    monkeypatch.setattr(self_test, "BESIDE", 3)
    monkeypatch.setattr(self_test, "ANSWER", 1)
    monkeypatch.setitem(measure.MATRIX_ROWS, "cuda", 64)
    monkeypatch.setitem(measure.BUFFER_BYTES, "cuda", 2**20)
    monkeypatch.setitem(measure.PREFILL_ROWS, "cuda", 8)
    with LaggingDevice():
        result = self_test.run_self_test(torch.device("cuda", 0), tiny=True)
    assert not result.left_out and not result.faults
    assert result.checked[0].kernels and len(result.products) == 2
    assert [step.without_graphs for step in result.steps] == [""]


def test_a_plan_measures_products_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    monkeypatch.setattr(measured, "BUFFER_BYTES", 2**16)
    matrix = PackedMatrix(INT8, 64, 64, 1, None, "F32")
    with LaggingDevice():
        rates = measured.measure_matmul(matrix, torch.bfloat16, torch.device("cuda", 0), 1)
    assert min(rates.bandwidth, rates.flops, rates.layer_s) > 0
