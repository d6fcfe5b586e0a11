"""Checkpoints with latent attention in other layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.errors import DamagedModel, UnsupportedModel
from tests.gguf_writer import write_gguf
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


def test_multi_token_prediction_layers_are_not_loaded(folder: Path) -> None:
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
    """Covers GGUF's layout, in which the up-projections of keys are transposed."""
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


def test_gguf_files_of_before_the_split_have_one_up_projection(folder: Path) -> None:
    """Covers the layout of llama.cpp's converter before April 2025."""
    tensors = load_file(folder / "model.safetensors")
    file = folder / "old.gguf"
    write_gguf(
        folder,
        file,
        without=[
            "attention.key_length_mla",
            "attention.value_length_mla",
            *(f"blk.{i}.attn_{kind}_b.weight" for i in range(3) for kind in "kv"),
        ],
        changed={
            "deepseek2.attention.head_count_kv": 6,
            "deepseek2.attention.key_length": LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"],
            "deepseek2.attention.value_length": LATENT["v_head_dim"],
            **{
                f"blk.{i}.attn_kv_b.weight": tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
                for i in range(3)
            },
        },
    )
    expected = make_engine(folder).logits([5, 6, 7])
    torch.testing.assert_close(make_engine(file).logits([5, 6, 7]), expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_count", 0, "without experts"),
        ("expert_gating_func", 1, "Mistral Large 3"),  # with weights that sum to one
    ],
)
def test_other_models_of_the_gguf_architecture_are_refused(folder: Path, key: str, value: int, words: str) -> None:
    write_gguf(folder, folder / "other.gguf", changed={f"deepseek2.{key}": value})
    with pytest.raises(UnsupportedModel, match=words):
        make_engine(folder / "other.gguf")
