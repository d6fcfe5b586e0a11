"""Of a model that also sees or hears, the part that reads text gives the logits it has in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.families import FAMILIES
from tests.models.proofs import difference, logits_of_transformers, token_ids
from tests.tiny import SMALL, make_engine, randomize

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
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")
    name, changes = FAMILIES[text]
    text_config = getattr(transformers, f"{name}ForCausalLM").config_class(**SMALL | changes | {"pad_token_id": 0})
    torch.manual_seed(0)
    hearing = {"audio_config": AUDIO[kind]} if kind in AUDIO else {}
    config = whole.config_class(text_config=text_config, vision_config=VISION[kind], **hearing)
    config.tie_word_embeddings = text_config.tie_word_embeddings
    model = whole(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    ids = token_ids(50)
    assert difference(make_engine(tmp_path).logits(ids), logits_of_transformers(model, ids)) <= 2e-4
