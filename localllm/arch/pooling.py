"""How the vectors of a text's tokens become one: what an embedder's files say beside config.json, as data.

Readers of files put it into the configuration under POOLING, whichever file it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.arch.config import ModelConfig
from localllm.arch.fields import Fields
from localllm.errors import UnsupportedModel

POOLING = "pooling"

Kind = Literal["mean", "cls", "last"]
KINDS: dict[str, Kind] = {"mean": "mean", "cls": "cls", "last": "last"}
Squash = Literal["identity", "tanh"]
SQUASHES: dict[str, Squash] = {"identity": "identity", "tanh": "tanh"}


@dataclass(frozen=True)
class DenseConfig:
    """activation(W x + bias), behind the pooling."""

    columns: int
    rows: int
    bias: bool
    activation: Squash


@dataclass(frozen=True)
class Pooling:
    kind: Kind  # of all tokens the mean; or the first token's vector, or the last one's
    dense: tuple[DenseConfig, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what is put before a text
    default_prompt: str = ""  # what is put before texts that ask for none


def pooling(config: Mapping[str, Any], model: ModelConfig) -> Pooling:
    """By `config[POOLING]`; where nothing is said, the mean, or for a model that does not look ahead the last.

    Raises UnsupportedModel for one that does not run, DamagedModel for fields that make no sense.
    """
    causal = model.encoder is None or model.encoder.causal
    found = Fields(config).part(POOLING)
    kind, prompts = found.text("kind", "last" if causal else "mean"), found.part("prompts")
    if kind not in KINDS:
        raise UnsupportedModel(f"the pooling {kind!r} is not supported", f"these are: {', '.join(KINDS)}")
    named = {name: prompts.text(name) for name in prompts.values if prompts.has(name)}
    chosen = found.text("default_prompt", "")
    return Pooling(
        kind=KINDS[kind],
        dense=tuple(dense(Fields(each)) for each in found.values.get("dense", ())),
        prompts=named,
        default_prompt=named.get(chosen, ""),
    )


def most_tokens(config: Mapping[str, Any]) -> int | None:
    """That it was trained for, where that is told; it may have positions for more."""
    return Fields(config).part(POOLING).size("most_tokens", None)


def dense(fields: Fields) -> DenseConfig:
    name = fields.text("activation", "tanh")
    if name not in SQUASHES:
        raise UnsupportedModel(
            f"a dense layer with {name!r} is not supported", f"these are: {', '.join(SQUASHES)}"
        )
    return DenseConfig(fields.size("columns"), fields.size("rows"), fields.flag("bias"), SQUASHES[name])


def dimension(model: ModelConfig, how: Pooling) -> int:
    """How many numbers a vector has."""
    return how.dense[-1].rows if how.dense else model.hidden_size
