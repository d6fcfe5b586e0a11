"""The text part of a multimodal model has the logits of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.families import FAMILIES
from tests.models.proofs import difference, logits_of_transformers, token_ids
from tests.tiny import SMALL, make_checkpoint, make_engine, randomize

VISION: dict[str, dict[str, Any]] = {
    "Gemma3": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    "Gemma4": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 32,
    },
    "Mistral3": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
    },
    "Qwen3_5": {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 48},
    "Qwen3_5Moe": {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 48},
}

AUDIO: dict[str, dict[str, Any]] = {
    "Gemma4": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 24,
    }
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("Gemma3", "Gemma 3"),
        ("Gemma4", "Gemma 4, like E2B"),
        ("Gemma4", "Gemma 4, like 26B-A4B"),
        ("Mistral3", "Mistral"),
        ("Mistral3", "Ministral 3"),
        ("Qwen3_5", "Qwen3.5"),
        ("Qwen3_5Moe", "Qwen3.5-MoE"),
    ],
    ids=str,
)
def test_the_text_part_runs(tmp_path: Path, kind: str, text: str) -> None:
    compare_with_transformers(make_whole(tmp_path, kind, text), tmp_path)


def make_whole(folder: Path, kind: str, text: str, *, tied: bool | None = None) -> Any:
    """Write a model with a vision part, and return it. tied: value of its own field, if it differs from the text
    part's.
    """
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")
    name, changes = FAMILIES[text]
    text_config = getattr(transformers, f"{name}ForCausalLM").config_class(**SMALL | changes | {"pad_token_id": 0})
    torch.manual_seed(0)
    hearing = {"audio_config": AUDIO[kind]} if kind in AUDIO else {}
    config = whole.config_class(text_config=text_config, vision_config=VISION[kind], **hearing)
    config.tie_word_embeddings = text_config.tie_word_embeddings if tied is None else tied
    model = whole(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def compare_with_transformers(model: Any, folder: Path) -> None:
    ids = token_ids(50)
    assert difference(make_engine(folder).logits(ids), logits_of_transformers(model, ids)) <= 2e-4


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize("stated", [True, ...], ids=["stated", "left out"])
def test_a_head_is_tied_where_the_outer_config_says_so(tmp_path: Path, stated: Any) -> None:
    model = make_whole(tmp_path, "Mistral3", "Mistral", tied=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, tie_word_embeddings=stated, text_config=text | {"tie_word_embeddings": False})
    compare_with_transformers(model, tmp_path)
    compare_with_transformers(type(model).from_pretrained(tmp_path).eval(), tmp_path)


def test_a_separate_head_is_used_whatever_the_config_says(tmp_path: Path) -> None:
    model = make_whole(tmp_path, "Mistral3", "Mistral", tied=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    compare_with_transformers(model, tmp_path)
    compare_with_transformers(type(model).from_pretrained(tmp_path).eval(), tmp_path)


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
def test_one_matrix_may_be_stored_under_the_name_of_the_head(tmp_path: Path, kind: str) -> None:
    model = make_whole(tmp_path, kind, {"Gemma3": "Gemma 3", "Mistral3": "Ministral 3"}[kind], tied=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text | {"tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors["lm_head.weight"] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    compare_with_transformers(model, tmp_path)


def test_layers_of_gemma_4_are_found_by_numbers_with_a_zero_before_them(tmp_path: Path) -> None:
    """transformers writes the numbers of models with ten or more layers in this form."""
    name, changes = FAMILIES["Gemma 4, like 31B"]
    changes = {k: v for k, v in changes.items() if k != "layer_types"} | {"num_hidden_layers": 12}
    model = make_checkpoint(tmp_path, name, **changes)
    assert "05" in json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    ids = token_ids(50)
    theirs, exact = logits_of_transformers(model, ids), logits_of_transformers(model.double(), ids)
    assert difference(make_engine(tmp_path).logits(ids), exact) <= 2 * difference(theirs, exact)
