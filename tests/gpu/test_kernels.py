"""Every kernel that a model calls on a GPU is within the bound of its reference, at tiny shapes of every family
and at real shapes of a Llama. The tests of each kernel for itself run on a GPU, too: tests/runtime/kernels/gpu."""

from pathlib import Path

import pytest
import torch

from bench.gpu.generated import SHAPES, Form
from bench.gpu.loop import generate
from bench.gpu.setting import Setting
from localllm.quant.vectors import KV_DTYPES, KVDtype
from localllm.runtime.engine import Engine
from tests.gpu.compare_kernels import compared
from tests.gpu.steps import drawn, greedy, run, text
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint, make_engine

PROMPTS = (1, 5, 16, 17, 70, 130)  # tokens: alone, then beside each other


def walk(engine: Engine, vocabulary: int, longest: int) -> None:
    prompts = [text(min(count, longest), vocabulary, count) for count in PROMPTS]
    for prompt in prompts[:2]:
        run(engine, [greedy(prompt, 4)])
    run(engine, [greedy(p, 6) if i % 2 else drawn(p, 6, i) for i, p in enumerate(prompts)])
    run(engine, [greedy(text(9, vocabulary, i), 4) for i in range(20)])


@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_every_family(family: str, tmp_path: Path, device: torch.device) -> None:
    """Uses bfloat16; test_families.py uses float32."""
    pytest.importorskip("transformers")
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path, torch.bfloat16, blocks=400, device=device, max_running=32, token_budget=64)
    with compared() as findings:
        walk(engine, 320, 200)
    assert not findings.wrong
    assert findings.ran, "no kernel ran but the references"


@pytest.mark.parametrize("kept", [None, *KV_DTYPES.values()])
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("size", ["1B", "8B"])
def test_those_of_a_llama_at_its_size(size: str, form: Form, kept: KVDtype | None, device: torch.device) -> None:
    shape = SHAPES[size] | {"num_hidden_layers": 1, "vocab_size": 32_000}
    model = generate(shape, form, Setting(device), 256, sequences=32, kv_dtype=kept)
    model.engine.runner.graphs = None  # a replay asks for no kernel
    with compared() as findings:
        walk(model.engine, shape["vocab_size"], 256)
        run(model.engine, [greedy(text(200, shape["vocab_size"], 7), 2)])
    assert not findings.wrong
    assert {name.split("/")[0] for name in findings.ran} >= {"fused_linear", "attention", "rope_append"}
