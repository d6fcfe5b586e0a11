"""Omitted config.json fields take the defaults of the family's class in transformers."""

from typing import Any

import pytest
import transformers

from localllm.arch.describe import parse_config
from localllm.errors import DamagedModel

# Of the published config.json files, what the class does not know by itself.
SHORT = {
    "Gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "SmolLM3": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "rms_norm_eps": 1e-06,
        "sliding_window": 512,
        "use_sliding_window": True,
        "vocab_size": 128256,
    },
}
CLASSES = [
    *("Llama", "Mistral", "Ministral", "Ministral3", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "SmolLM3"),
    *("Granite", "Olmo2", "Olmo3", "Glm4", "Cohere2", "Gemma2", "Gemma3", "GptOss"),
    *("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Lfm2", "Lfm2Moe"),
]


def whole(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Content of config.json with all defaults of the class of `kind`."""
    family = getattr(transformers, f"{kind}ForCausalLM")
    return family.config_class(**fields).to_dict() | {"architectures": [family.__name__], "eos_token_id": 2}


@pytest.mark.parametrize("kind", SHORT)
def test_a_short_config_has_the_defaults_of_transformers(kind: str) -> None:
    expected = whole(kind, SHORT[kind])
    names = {"architectures": expected["architectures"], "eos_token_id": 2}
    assert parse_config(SHORT[kind] | names) == parse_config(expected)


@pytest.mark.parametrize("kind", CLASSES)
def test_omitted_fields_never_change_meaning(kind: str) -> None:
    """Each field in turn: the default of the family's class in transformers, or an error that names it."""
    fields = whole(kind, {})
    named = 0
    for left_out in fields.keys() - {"architectures", "eos_token_id"}:
        short = {name: value for name, value in fields.items() if name != left_out}
        try:
            described = parse_config(short)
        except DamagedModel as error:
            named += left_out in error.message
            continue
        expected = whole(kind, {name: value for name, value in short.items() if name != "architectures"})
        assert described == parse_config(expected), left_out
    assert named >= 3  # sizes that no two models share


def test_windows_of_qwen3_moe_are_in_all_layers_or_none() -> None:
    fields = whole("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 10})
    assert {layer.mixer.window for layer in parse_config(fields).layers} == {32}
