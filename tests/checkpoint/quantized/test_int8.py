"""A compressed-tensors INT8 checkpoint has the logits of its dequantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.quant.formats.groups import dequantize_bytes, quantize_int8
from localllm.quant.tensor import QuantizedTensor
from tests.tiny import make_checkpoint, make_engine

LAYOUT = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


def quantize(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        packed = quantize_int8(tensors[name], torch.float32)
        tensors[name] = packed.parts["q"]
        tensors[f"{name}_scale"] = packed.parts["scale"]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": LAYOUT}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint, and the transformers model of its dequantized weights."""
    model = make_checkpoint(tmp_path, "Qwen3", hidden_size=64, intermediate_size=96, head_dim=16)
    quantize(tmp_path)
    check_quantization(read_header(tmp_path).config)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data = dequantize_bytes(quantize_int8(weight.data, torch.float32), torch.float32)
    return tmp_path, model


IDS = list(range(3, 40))


def test_logits_are_those_of_the_dequantized_weights(quantized: tuple[Path, Any]) -> None:
    folder, model = quantized
    expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(make_engine(folder).logits(IDS), expected, atol=1e-4, rtol=0)


def test_rows_are_padded_to_full_vectors(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Llama", hidden_size=60, intermediate_size=72, head_dim=10)
    exact = model(torch.tensor([IDS])).logits[0]
    quantize(tmp_path)
    engine = make_engine(tmp_path, torch.bfloat16)
    assert isinstance(engine.runner.model.layers[0].ffn.down.weights[0], QuantizedTensor)
    assert (engine.logits(IDS) - exact).abs().mean() < exact.abs().mean() / 10


def test_in_bfloat16_the_error_is_at_most_twice_that_of_transformers(quantized: tuple[Path, Any]) -> None:
    folder, model = quantized
    exact = model(torch.tensor([IDS])).logits[0]
    theirs = model.bfloat16()(torch.tensor([IDS])).logits[0].float()
    ours = make_engine(folder, torch.bfloat16).logits(IDS)
    packed = make_engine(folder, torch.bfloat16).runner.model.layers[0].ffn.down.weights[0]
    assert isinstance(packed, QuantizedTensor)
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
