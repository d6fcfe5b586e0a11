"""Parses a checkpoint's `config.json` to a ModelConfig and to the layout of its tensors.

Nothing outside `families/` refers to a family by name. A new family is a function in `families/` and a row in
`tests/models/families.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.arch.config import AttentionConfig, EncoderConfig, ModelConfig
from localllm.arch.families import encoders, gemma, hybrids, llama, moe  # noqa: F401 - imported to fill FAMILIES
from localllm.arch.families.shared import FAMILIES, Family
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import LM_HEAD, MULTIMODAL, TensorLayout
from localllm.arch.pooling import POOLING, max_seq_length
from localllm.errors import UnsupportedModel


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model that a `config.json` describes; for a multimodal model, its text part.

    Raises UnsupportedModel for an unsupported family, activation or rope, and DamagedModel if a field is missing
    or invalid.
    """
    family = family_of(config)
    model = family.describe(family_fields(family, config))
    model = as_encoder(model) if is_embedder(config) and not model.encoder else model
    max_length = max_seq_length(config)
    return replace(model, default_context=min(max_length, model.max_context)) if max_length else model


def is_embedder(config: Mapping[str, Any]) -> bool:
    """Return whether the model computes embeddings, according to its class or a pooling file.

    Its head is not used then.
    """
    return POOLING in config or architecture_name(config) not in FAMILIES


def causal_class(name: str) -> str:
    """Return the name of the class with a language model head."""
    return name.removesuffix("Model") + "ForCausalLM"


def as_encoder(config: ModelConfig) -> ModelConfig:
    """Return a decoder's layers without head and cache. Raises UnsupportedModel if that is not possible."""
    plain = all(
        isinstance(c, AttentionConfig) and not (c.softcap or c.sinks or c.output_gate or c.query_growth)
        for c in (layer.mixer for layer in config.layers)
    )
    if not plain or config.per_layer or any(layer.output_scale for layer in config.layers):
        raise UnsupportedModel("embeddings by a model of this family are not supported", "load it as an LLM")
    return replace(config, encoder=EncoderConfig(causal=True), tie_embeddings=False)


def tensor_layout(config: Mapping[str, Any]) -> TensorLayout:
    """Return how checkpoints with this `config.json` name their tensors. Raises the errors of `parse_config`."""
    family = family_of(config)
    layout = family.layout(family_fields(family, config)) if callable(family.layout) else family.layout
    unused = [MULTIMODAL] if ConfigFields(config).has("text_config") else []
    unused += [LM_HEAD] if is_embedder(config) else []
    return replace(layout, unused=(*layout.unused, *unused)) if unused else layout


def family_fields(family: Family, config: Mapping[str, Any]) -> ConfigFields:
    return ConfigFields({**family.defaults, **text_fields(config)})


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
    if name == "Mistral3ForConditionalGeneration":  # a wrapper for two families
        text_type = ConfigFields(config).section("text_config").text("model_type", "mistral")
        name = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}.get(text_type, text_type)
    return name


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a multimodal model's text part, and the outer fields that it lacks."""
    part = ConfigFields(config).section("text_config").values
    stated = {name: value for name, value in part.items() if value is not None}
    if part and (tied := ties_whole_model(config)) is not None:
        stated["tie_word_embeddings"] = tied
    return {**part, **config, **stated}


def ties_whole_model(config: Mapping[str, Any]) -> bool | None:
    """Whether the top level of a multimodal model's config.json ties head and embedding; Mistral 3's does unless
    it states otherwise. None if only the text part states it."""
    is_mistral3 = "Mistral3ForConditionalGeneration" in ConfigFields(config).texts("architectures")
    stated = config.get("tie_word_embeddings")
    return is_mistral3 or None if stated is None else ConfigFields(config).flag("tie_word_embeddings")
