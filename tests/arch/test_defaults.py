"""Configurations as they lie on the Hub: fields left out that the family's class in transformers fills in."""

from typing import Any

import pytest
import transformers

from localllm.arch.families import describe

# Of the published config.json files, what the class does not know by itself.
SHORT = {
    "Gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize("kind", SHORT)
def test_a_short_config_means_what_transformers_makes_of_it(kind: str) -> None:
    family = getattr(transformers, f"{kind}ForCausalLM")
    whole: dict[str, Any] = family.config_class(**SHORT[kind]).to_dict()
    names = {"architectures": [f"{kind}ForCausalLM"], "eos_token_id": whole["eos_token_id"]}
    assert describe(SHORT[kind] | names) == describe(whole | names)
