"""A checkpoint's `config.json` -> ModelConfig, and how it spells its tensors.

Nothing after this file asks for a family's name. A new family is a function in `families/` and a row in
`tests/models/families.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.arch.config import ModelConfig
from localllm.arch.families import gemma, hybrids, latent, llama, mixtures, placed  # noqa: F401 - they fill FAMILIES
from localllm.arch.families.registry import FAMILIES, Family
from localllm.arch.fields import Fields
from localllm.arch.layout import OTHER_SENSES, Layout
from localllm.errors import UnsupportedModel


def describe(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` names; of one that also sees or hears, the part that reads text.

    Raises UnsupportedModel for a family, activation or rope that does not run here, and DamagedModel where a
    field is missing or makes no sense.
    """
    known = family_of(config)
    return known.describe(fields_of(known, config))


def layout(config: Mapping[str, Any]) -> Layout:
    """How checkpoints of this `config.json` spell their tensors. Raises as `describe`."""
    known = family_of(config)
    found = known.layout(fields_of(known, config)) if callable(known.layout) else known.layout
    return replace(found, unused=(*found.unused, OTHER_SENSES)) if Fields(config).has("text_config") else found


def fields_of(known: Family, config: Mapping[str, Any]) -> Fields:
    return Fields({**known.defaults, **text_fields(config)})


def family_of(config: Mapping[str, Any]) -> Family:
    name = next(iter(Fields(config).texts("architectures")), "none")
    if name == "Mistral3ForConditionalGeneration":  # a frame for two families
        kind = Fields(config).part("text_config").text("model_type", "mistral")
        name = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}.get(kind, kind)
    if name not in FAMILIES:
        raise UnsupportedModel(f"the family {name!r} is not supported", "docs/models.md lists those that are")
    return FAMILIES[name]


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal model the fields of its text part, and those of the whole that it does not have itself."""
    part = Fields(config).part("text_config").values
    return {**part, **config, **{name: value for name, value in part.items() if value is not None}}
