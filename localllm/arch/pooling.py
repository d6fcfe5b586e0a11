"""Pooling of the vectors of a text's tokens: an embedder's settings outside config.json, as data.

The readers of all file formats store them in the configuration under POOLING.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.arch.config import ModelConfig
from localllm.arch.fields import ConfigFields
from localllm.errors import UnsupportedModel

POOLING = "pooling"

PoolingType = Literal["mean", "cls", "last"]
POOLING_TYPES: dict[str, PoolingType] = {"mean": "mean", "cls": "cls", "last": "last"}
DenseActivation = Literal["identity", "tanh"]
DENSE_ACTIVATIONS: dict[str, DenseActivation] = {"identity": "identity", "tanh": "tanh"}


@dataclass(frozen=True)
class DenseConfig:
    """activation(W x + bias), after pooling"""

    columns: int
    rows: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True)
class Pooling:
    pooling_type: PoolingType  # the mean of all tokens' vectors, the first one or the last one
    dense: tuple[DenseConfig, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name, prepended to a text
    default_prompt: str = ""  # prepended to a text without a requested prompt


def parse_pooling(config: Mapping[str, Any], model: ModelConfig) -> Pooling:
    """Parse `config[POOLING]`; by default the mean, or for a causal model the last token.

    Raises UnsupportedModel for unsupported pooling, and DamagedModel for invalid fields.
    """
    causal = model.encoder is None or model.encoder.causal
    fields = ConfigFields(config).section(POOLING)
    pooling_type, prompts = fields.text("kind", "last" if causal else "mean"), fields.section("prompts")
    if pooling_type not in POOLING_TYPES:
        raise UnsupportedModel(
            f"the pooling {pooling_type!r} is not supported", f"these are: {', '.join(POOLING_TYPES)}"
        )
    prompt_texts = {name: prompts.text(name) for name in prompts.values if prompts.has(name)}
    default_name = fields.text("default_prompt", "")
    return Pooling(
        pooling_type=POOLING_TYPES[pooling_type],
        dense=tuple(parse_dense(ConfigFields(layer)) for layer in fields.values.get("dense", ())),
        prompts=prompt_texts,
        default_prompt=prompt_texts.get(default_name, ""),
    )


def max_seq_length(config: Mapping[str, Any]) -> int | None:
    """Return the maximum length that the model was trained for, if known; it may have positions for more."""
    return ConfigFields(config).section(POOLING).size("most_tokens", None)


def parse_dense(fields: ConfigFields) -> DenseConfig:
    name = fields.text("activation", "tanh")
    if name not in DENSE_ACTIVATIONS:
        raise UnsupportedModel(
            f"a dense layer with {name!r} is not supported", f"these are: {', '.join(DENSE_ACTIVATIONS)}"
        )
    return DenseConfig(fields.size("columns"), fields.size("rows"), fields.flag("bias"), DENSE_ACTIVATIONS[name])


def embedding_size(model: ModelConfig, pooling: Pooling) -> int:
    """Return the dimension of the model's embeddings."""
    return pooling.dense[-1].rows if pooling.dense else model.hidden_size
