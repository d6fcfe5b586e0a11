"""Every kernel that a model calls on a GPU is within the bound of its reference, at tiny shapes of every family
and at real shapes of a Llama. The tests of each kernel for itself run on a GPU, too: tests/runtime/kernels/gpu."""

from pathlib import Path

import pytest
import torch

from localllm.benchmark.gpu.decode_steps import generate
from localllm.benchmark.gpu.generated import SHAPES, Form
from localllm.benchmark.gpu.self_test import compared, run_all_kinds_of_steps
from localllm.quant.vectors import KV_DTYPES, KVDtype
from tests.gpu.steps import greedy, run, text
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint, make_engine


@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_every_family(family: str, tmp_path: Path, device: torch.device) -> None:
    """Uses bfloat16; test_families.py uses float32."""
    pytest.importorskip("transformers")
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path, torch.bfloat16, blocks=400, device=device, max_running=32, token_budget=64)
    engine.runner.graphs = None  # replays call no kernel of the registry, and references cannot be captured
    with compared() as findings:
        run_all_kinds_of_steps(engine, 320, 200)
    assert not findings.wrong
    assert findings.ran, "no kernel ran but the references"


@pytest.mark.parametrize("kept", [None, *KV_DTYPES.values()])
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("size", ["1B", "8B"])
def test_those_of_a_llama_at_its_size(size: str, form: Form, kept: KVDtype | None, device: torch.device) -> None:
    shape = SHAPES[size] | {"num_hidden_layers": 1, "vocab_size": 32_000}
    model = generate(shape, form, device, 256, sequences=32, kv_dtype=kept)
    model.engine.runner.graphs = None
    with compared() as findings:
        run_all_kinds_of_steps(model.engine, shape["vocab_size"], 256)
        run(model.engine, [greedy(text(200, shape["vocab_size"], 7), 2)])
    assert not findings.wrong
    assert {name.split("/")[0] for name in findings.ran} >= {"fused_linear", "attention", "rope_append"}
