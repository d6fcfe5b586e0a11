"""How the vectors of a text's tokens become one: what an embedder's files say beside config.json, as data.

Readers of files put it into the configuration under POOLING, whichever file it came from.
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
    """activation(W x + bias), behind the pooling."""

    columns: int
    rows: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True)
class Pooling:
    pooling_type: PoolingType  # of all tokens the mean; or the first token's vector, or the last one's
    dense: tuple[DenseConfig, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what is put before a text
    default_prompt: str = ""  # what is put before texts that ask for none


def parse_pooling(config: Mapping[str, Any], model: ModelConfig) -> Pooling:
    """By `config[POOLING]`; where nothing is said, the mean, or for a model that does not look ahead the last.

    Raises UnsupportedModel for one that does not run, DamagedModel for fields that make no sense.
    """
    causal = model.encoder is None or model.encoder.causal
    found = ConfigFields(config).section(POOLING)
    kind, prompts = found.text("kind", "last" if causal else "mean"), found.section("prompts")
    if kind not in POOLING_TYPES:
        raise UnsupportedModel(f"the pooling {kind!r} is not supported", f"these are: {', '.join(POOLING_TYPES)}")
    named = {name: prompts.text(name) for name in prompts.values if prompts.has(name)}
    chosen = found.text("default_prompt", "")
    return Pooling(
        pooling_type=POOLING_TYPES[kind],
        dense=tuple(parse_dense(ConfigFields(each)) for each in found.values.get("dense", ())),
        prompts=named,
        default_prompt=named.get(chosen, ""),
    )


def max_seq_length(config: Mapping[str, Any]) -> int | None:
    """That it was trained for, where that is told; it may have positions for more."""
    return ConfigFields(config).section(POOLING).size("most_tokens", None)


def parse_dense(fields: ConfigFields) -> DenseConfig:
    name = fields.text("activation", "tanh")
    if name not in DENSE_ACTIVATIONS:
        raise UnsupportedModel(
            f"a dense layer with {name!r} is not supported", f"these are: {', '.join(DENSE_ACTIVATIONS)}"
        )
    return DenseConfig(fields.size("columns"), fields.size("rows"), fields.flag("bias"), DENSE_ACTIVATIONS[name])


def embedding_size(model: ModelConfig, pooling: Pooling) -> int:
    """How many numbers a vector has."""
    return pooling.dense[-1].rows if pooling.dense else model.hidden_size
