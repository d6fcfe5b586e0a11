"""Every family gives the logits of `transformers`, in float32, on checkpoints whose sizes are not the defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import LLAMA3_ROPE, make_checkpoint, make_engine

WINDOW_OF_SOME = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama default head size": ("Llama", {"head_dim": None}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama without groups": ("Llama", {"num_key_value_heads": 6}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1, "head_dim": 18}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied, some windows": ("Qwen2", {"tie_word_embeddings": True, **WINDOW_OF_SOME}),
    "qwen3": ("Qwen3", {}),
    "qwen3 tied, biases, some windows": (
        "Qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, **WINDOW_OF_SOME},
    ),
}


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    theirs = make_checkpoint(tmp_path, kind, **changes)
    ids = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = theirs(torch.tensor([ids])).logits[0]
    engine = make_engine(tmp_path)
    got = engine.logits(ids)
    assert expected.std() > 0.5  # a dead model would agree with anything
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    engine.pool.check()


def test_config_of_before_transformers_5_is_understood(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", rope_parameters=LLAMA3_ROPE)
    expected = make_engine(tmp_path).logits([5, 6, 7])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    file.write_text(json.dumps(config))
    torch.testing.assert_close(make_engine(tmp_path).logits([5, 6, 7]), expected)
