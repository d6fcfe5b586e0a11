"""Checkpoints with latent attention as others write them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.errors import DamagedModel
from tests.models.families import LATENT
from tests.tiny import make_checkpoint, make_engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "DeepseekV3", **LATENT, num_mtp_layers=2)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def test_layers_that_guess_further_tokens_are_left_unread(folder: Path) -> None:
    def append(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
        tensors["model.layers.4.self_attn.o_proj.weight"] = torch.ones(2, 2)

    expected = make_engine(folder).logits([5, 6, 7])
    rewrite(folder, append)
    torch.testing.assert_close(make_engine(folder).logits([5, 6, 7]), expected)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.raises(DamagedModel, match=r"layers\.4\."):
        make_engine(folder)


def test_up_projections_may_be_stored_apart(folder: Path) -> None:
    """As GGUF has them: those of the keys transposed."""
    heads, rank, nope, value = 6, LATENT["kv_lora_rank"], LATENT["qk_nope_head_dim"], LATENT["v_head_dim"]

    def split(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(3):
            name = f"model.layers.{i}.self_attn"
            k, v = tensors.pop(f"{name}.kv_b_proj.weight").view(heads, -1, rank).split((nope, value), 1)
            tensors[f"{name}.k_b_proj.weight"] = k.transpose(1, 2).reshape(heads * rank, nope)
            tensors[f"{name}.v_b_proj.weight"] = v.reshape(heads * value, rank)

    expected = make_engine(folder).logits([5, 6, 7])
    rewrite(folder, split)
    torch.testing.assert_close(make_engine(folder).logits([5, 6, 7]), expected)
