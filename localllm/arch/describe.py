"""A checkpoint's `config.json` -> ModelConfig, and how it spells its tensors.

Nothing after this file asks for a family's name. A new family is a function in `families/` and a row in
`tests/models/families.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.arch.config import AttentionConfig, EncoderConfig, ModelConfig
from localllm.arch.families import (  # noqa: F401 - they fill FAMILIES
    encoders,
    gemma,
    hybrids,
    latent,
    llama,
    mixtures,
    placed,
)
from localllm.arch.families.registry import FAMILIES, Family
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import LM_HEAD, MULTIMODAL, TensorLayout
from localllm.arch.pooling import POOLING, max_seq_length
from localllm.errors import UnsupportedModel


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` names; of one that also sees or hears, the part that reads text.

    Raises UnsupportedModel for a family, activation or rope that does not run here, and DamagedModel where a
    field is missing or makes no sense.
    """
    known = family_of(config)
    found = known.describe(family_fields(known, config))
    found = as_encoder(found) if is_embedder(config) and not found.encoder else found
    usual = max_seq_length(config)
    return replace(found, default_context=min(usual, found.max_context)) if usual else found


def is_embedder(config: Mapping[str, Any]) -> bool:
    """Is it for vectors, by its name or by what stands beside it? A decoder's head is not used then."""
    return POOLING in config or architecture_name(config) not in FAMILIES


def causal_class(name: str) -> str:
    """The family that is this class with a head."""
    return name.removesuffix("Model") + "ForCausalLM"


def as_encoder(config: ModelConfig) -> ModelConfig:
    """A decoder's layers without its head and its cache. Raises UnsupportedModel where they cannot do without."""
    plain = all(
        isinstance(c, AttentionConfig) and not (c.softcap or c.sinks or c.output_gate or c.query_growth)
        for c in (layer.mixer for layer in config.layers)
    )
    if not plain or config.per_layer or any(layer.output_scale for layer in config.layers):
        raise UnsupportedModel("vectors of a model of this family alone are not supported", "load it as an LLM")
    return replace(config, encoder=EncoderConfig(causal=True), tie_embeddings=False)


def tensor_layout(config: Mapping[str, Any]) -> TensorLayout:
    """How checkpoints of this `config.json` spell their tensors. Raises as `describe`."""
    known = family_of(config)
    found = known.layout(family_fields(known, config)) if callable(known.layout) else known.layout
    unused = [MULTIMODAL] if ConfigFields(config).has("text_config") else []
    unused += [LM_HEAD] if is_embedder(config) else []
    return replace(found, unused=(*found.unused, *unused)) if unused else found


def family_fields(known: Family, config: Mapping[str, Any]) -> ConfigFields:
    return ConfigFields({**known.defaults, **text_fields(config)})


def family_of(config: Mapping[str, Any]) -> Family:
    name = architecture_name(config)
    name = name if name in FAMILIES else causal_class(name)
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"the family {architecture_name(config)!r} is not supported", "docs/models.md lists those that are"
        )
    return FAMILIES[name]


def architecture_name(config: Mapping[str, Any]) -> str:
    name = next(iter(ConfigFields(config).texts("architectures")), "none")
    if name == "Mistral3ForConditionalGeneration":  # a frame for two families
        kind = ConfigFields(config).section("text_config").text("model_type", "mistral")
        name = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}.get(kind, kind)
    return name


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal model the fields of its text part, and those of the whole that it does not have itself."""
    part = ConfigFields(config).section("text_config").values
    return {**part, **config, **{name: value for name, value in part.items() if value is not None}}
