"""Impossible values in config.json are rejected in one sentence before any memory is allocated."""

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.arch.describe import parse_config
from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint, make_engine

VALUES = [0, 1, 5, 2**30, 2**31 - 1, 10**400, 1e308, 5e-324, 1.0000000000000002, True, "", [], [1], {}, ["x"]]
HOSTILE = ["Phi-4-mini", "gpt-oss", "SmolLM3", "Qwen3-Next", "LFM2-MoE"]


def places(config: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [place for k, v in config.items() if isinstance(v, dict) for place in places(v, (*at, k))]
    return [(*at, name) for name in config] + inner


@pytest.mark.quick_every(11)
@pytest.mark.parametrize("name", HOSTILE)
def test_any_field_may_hold_anything(tmp_path: Path, name: str) -> None:
    kind, changes = FAMILIES[name]
    make_checkpoint(tmp_path, kind, **changes)
    file = tmp_path / "config.json"
    original = file.read_text()
    refused = 0
    for *outer, last in places(json.loads(original)):
        for value in VALUES:
            config = json.loads(original)
            part = config
            for step in outer:
                part = part[step]
            part[last] = value
            file.write_text(json.dumps(config))
            try:
                make_engine(tmp_path, blocks=4)
            except LocalLLMError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 100


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Gemma2", {"use_bidirectional_attention": True}),
        ("Olmo3", {"layer_types": ["full_attention", "chunked_attention"], "sliding_window": 4}),
        ("Qwen3Next", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("Lfm2", {"layer_types": ["conv", "linear_attention"]}),
        ("GptOss", {"swiglu_alpha": 1.5, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_field_that_changes_results_is_never_ignored(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        parse_config(LLAMA | {"architectures": [f"{family}ForCausalLM"]} | changes)


def test_a_missing_norm_epsilon_is_an_error() -> None:
    with pytest.raises(DamagedModel, match="lacks rms_norm_eps"):
        parse_config({name: value for name, value in LLAMA.items() if name != "rms_norm_eps"})


def test_chosen_experts_must_fit_into_the_chosen_groups() -> None:
    groups = {"n_group": 4, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 3}
    sizes = {"moe_intermediate_size": 8, "n_shared_experts": 1, "partial_rotary_factor": 1.0}
    with pytest.raises(DamagedModel, match="1 of 4 groups contain fewer than 3 experts"):
        parse_config(LLAMA | {"architectures": ["Glm4MoeForCausalLM"]} | groups | sizes)
