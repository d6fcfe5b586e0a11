"""A gpt-oss checkpoint with MXFP4 experts has the logits of their dequantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.errors import DamagedModel
from localllm.quant.tensor import QuantizedTensor
from tests.models.families import FAMILIES
from tests.models.proofs import difference, token_ids
from tests.tiny import make_checkpoint, make_engine

IDS = token_ids(40)


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Any]:
    return tmp_path, write_published(tmp_path)


def write_published(folder: Path) -> Any:
    """Write random blocks and scales, and return the transformers model with the dequantized weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes a second

    kind, changes = FAMILIES["gpt-oss"]
    model = make_checkpoint(folder, kind, **changes | {"hidden_size": 64, "intermediate_size": 96})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data = exact
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_logits_are_those_of_the_dequantized_experts(published: tuple[Path, Any]) -> None:
    folder, model = published
    assert difference(make_engine(folder).logits(IDS), model(torch.tensor([IDS])).logits[0]) <= 1e-3


def test_experts_stay_packed(published: tuple[Path, Any]) -> None:
    expert = make_engine(published[0], torch.bfloat16).runner.model.layers[0].ffn.experts[0]
    assert isinstance(expert.gate_up.weights[0], QuantizedTensor)
    assert expert.gate_up.weights[0].nbytes == 192 * 64 * 17 // 32  # 16 bytes and a scale for 32 elements


def test_a_scale_that_means_nan_is_refused(published: tuple[Path, Any]) -> None:
    file = published[0] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(tensors, file)
    with pytest.raises(DamagedModel, match=r"experts\.down_proj_scales' has a scale that is NaN"):
        make_engine(published[0])
