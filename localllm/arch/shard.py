"""The division of a model among ranks by tensor parallelism: heads, columns and rows of the vocabulary. Pure data.

A matrix whose rows are heads or intermediate columns is divided by rows, and the matrix that reads them by
columns, so that each layer needs two all-reduces (Shoeybi et al. 2019, Megatron-LM). Matrices that stack several,
such as `qkv_proj`, are divided within each of them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from localllm.arch.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    LayerConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    ShortConvConfig,
)
from localllm.arch.layout import PER_LAYER_TABLE
from localllm.errors import UnsupportedModel, UsageError

MAX_RANKS = 64
Segments = tuple[tuple[int, int], ...]  # (begin, end) each


@dataclass(frozen=True)
class Shard:
    """One rank of several processes that compute a model together."""

    rank: int
    size: int
    whole_experts: bool = False  # divide MoE layers by whole experts instead of columns of each
    by_rows: bool = False  # divide all matrices by rows, also those whose input the ranks have computed in parts

    def range_of(self, count: int) -> tuple[int, int]:
        """Return this rank's range of `count` heads, columns or channels, which the size divides."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def kv_range(self, kv_heads: int) -> tuple[int, int]:
        """Return this rank's range of key and value heads: several ranks have the same if there are too few."""
        if kv_heads >= self.size:
            return self.range_of(kv_heads)
        head = self.rank * kv_heads // self.size
        return head, head + 1

    def vocab_range(self, vocab_size: int) -> tuple[int, int]:
        """Return this rank's rows of the vocabulary; those of the last rank may be fewer."""
        count = self.vocab_rows(vocab_size)
        return min(self.rank * count, vocab_size), min((self.rank + 1) * count, vocab_size)

    def vocab_rows(self, vocab_size: int) -> int:
        """Return the most rows of the vocabulary of any rank."""
        return -(-vocab_size // self.size)


@dataclass(frozen=True)
class Division:
    """The part of a matrix [rows, columns], or of a vector [rows], that a rank has."""

    axis: Literal["rows", "columns"]
    total: int  # rows or columns of the whole
    segments: Segments

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.segments)


def check_process_count(size: int) -> None:
    """Raise UsageError for an invalid number of processes."""
    if type(size) is not int or not 1 <= size <= MAX_RANKS:
        raise UsageError(f"{size!r} is not a number of processes", f"give a whole number from 1 to {MAX_RANKS}")


def check_experts(config: ModelConfig, shard: Shard) -> None:
    """Raise UnsupportedModel if there are no experts to divide. config: of the whole model"""
    if shard.whole_experts and not config.mixtures:
        raise UnsupportedModel("this model has no experts to divide", "leave out --expert-parallel")


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the configuration of one rank's layers. Raises UnsupportedModel for what cannot be divided."""
    if config.encoder:
        raise refusal("an embedding model", shard, never=True)
    return replace(config, layers=tuple(shard_layer(layer, shard) for layer in config.layers))


def shard_layer(layer: LayerConfig, shard: Shard) -> LayerConfig:
    return replace(layer, mixer=shard_mixer(layer.mixer, shard), ffn=shard_ffn(layer.ffn, shard))


def shard_mixer(c: Mixer, shard: Shard) -> Mixer:
    match c:
        case AttentionConfig():
            if c.kv_heads % shard.size and shard.size % c.kv_heads:
                raise refusal(f"a model with {c.kv_heads} key and value heads", shard)
            heads = divide(c.heads, shard, "attention heads")
            return replace(c, heads=heads, kv_heads=max(1, c.kv_heads // shard.size))
        case LatentConfig():
            return replace(c, heads=divide(c.heads, shard, "attention heads"))
        case DeltaNetConfig():
            key_heads = divide(c.key_heads, shard, "key heads of a delta net")
            return replace(c, key_heads=key_heads, value_heads=c.value_heads // shard.size)
        case ShortConvConfig():
            return replace(c, channels=divide(c.channels, shard, "channels of a convolution"))


def shard_ffn(c: MLPConfig | MoEConfig, shard: Shard) -> MLPConfig | MoEConfig:
    if isinstance(c, MoEConfig):
        shared = c.shared and shard_mlp(c.shared, shard)
        if shard.whole_experts:
            divide(c.experts, shard, "experts")
            return replace(c, own_experts=shard.range_of(c.experts), shared=shared)
        columns = divide(c.expert.intermediate_size, shard, "columns of each expert", "--expert-parallel")
        return replace(c, expert=replace(c.expert, intermediate_size=columns), shared=shared)
    return shard_mlp(c, shard)


def shard_mlp(c: MLPConfig, shard: Shard) -> MLPConfig:
    return replace(c, intermediate_size=divide(c.intermediate_size, shard, "intermediate columns"))


def divide(count: int, shard: Shard, what: str, flag: str | None = None) -> int:
    """Return the share of each rank. Raises UnsupportedModel for an uneven one; flag: divides it another way"""
    if count % shard.size:
        raise refusal(f"a model with {count} {what}", shard, flag=flag)
    return count // shard.size


def refusal(what: str, shard: Shard, *, never: bool = False, flag: str | None = None) -> UnsupportedModel:
    """Return the error for a model that cannot be divided. never: among no number of processes; flag: to suggest,
    too"""
    remedy = "leave out --tensor-parallel" if never else "use another number with --tensor-parallel"
    remedy += f", or add {flag}" if flag else ""
    return UnsupportedModel(f"{what} cannot be divided among {shard.size} processes", remedy)


LAYER = re.compile(r"layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.(experts\.\d+|shared)\.")
EXPERT_INDEX = re.compile(r"\.mlp\.experts\.(\d+)\.")


def is_elsewhere(name: str, config: ModelConfig, shard: Shard) -> bool:
    """Return whether a tensor belongs to an expert that another rank has. name: as in `division_of`"""
    match = EXPERT_INDEX.search(name) if shard.whole_experts else None
    layer = layer_of(name, config)
    if match is None or layer is None or not isinstance(layer.ffn, MoEConfig):
        return False
    first, end = shard.range_of(layer.ffn.experts)
    return not first <= int(match[1]) < end


def layer_of(name: str, config: ModelConfig) -> LayerConfig | None:
    """Return the layer that a tensor belongs to, if it is one of the configuration's."""
    match = LAYER.fullmatch(name)
    index = int(match[1]) - (config.stage.first if config.stage else 0) if match else -1
    return config.layers[index] if 0 <= index < len(config.layers) else None


def division_of(name: str, config: ModelConfig, shard: Shard) -> Division | None:
    """Return the part of a tensor that a rank has; None for all of it.

    name: in `arch.layout`, without its suffix if it is a matrix with a weight or parts of a quantized format;
    config: of the whole model. Raises UnsupportedModel for what cannot be divided by rows alone.
    """
    division = usual_division(name, config, shard)
    if division is None or division.axis == "rows" or not shard.by_rows:
        return division
    if len(division.segments) > 1 or EXPERT.search(name):
        raise refusal("an MoE model or a tiled delta net in this format", shard)
    divide(config.hidden_size, shard, "dimensions of hidden states")
    return rows(config.hidden_size, shard.range_of(config.hidden_size))


def usual_division(name: str, config: ModelConfig, shard: Shard) -> Division | None:
    if name in ("embed_tokens", "lm_head"):
        return rows(config.vocab_size, shard.vocab_range(config.vocab_size))
    if name == PER_LAYER_TABLE and config.per_layer:
        return rows(config.per_layer.vocab_size, shard.vocab_range(config.per_layer.vocab_size))
    layer = layer_of(name, config)
    if layer is None:
        return None
    own_name = name.split(".", 2)[2]
    scope, _, last = own_name.rpartition(".")
    if scope.startswith("mlp"):
        return mlp_division(own_name, layer.ffn, shard)
    return mixer_division(own_name if scope == "" else last, layer.mixer, shard)


def mlp_division(name: str, ffn: MLPConfig | MoEConfig, shard: Shard) -> Division | None:
    if isinstance(ffn, MoEConfig):
        match = EXPERT.match(name)
        routed = None if shard.whole_experts else ffn.expert
        mlp = routed if match and match[1] != "shared" else ffn.shared if match else None
    else:
        mlp = ffn
    if mlp is None:
        return None
    count = mlp.intermediate_size
    own = shard.range_of(count)
    match name.rpartition(".")[2]:
        case "gate_proj" | "up_proj":
            return rows(count, own)
        case "gate_up_proj":
            return stacked_rows((count, own), (count, own))
        case "down_proj":
            return Division("columns", count, (own,))
        case _:
            return None


def mixer_division(name: str, mixer: Mixer, shard: Shard) -> Division | None:
    return dict(mixer_divisions(mixer, shard)).get(name)


def mixer_divisions(c: Mixer, shard: Shard) -> Iterator[tuple[str, Division]]:
    """Yield the tensors of a mixer that are divided."""
    match c:
        case AttentionConfig():
            own, kv_own = shard.range_of(c.heads), shard.kv_range(c.kv_heads)
            q = scaled(c.heads, own, c.head_dim * (2 if c.output_gate else 1))
            kv = scaled(c.kv_heads, kv_own, c.head_dim)
            yield "q_proj", rows(*q)
            yield "k_proj", rows(*kv)
            yield "v_proj", rows(*kv)
            yield "qkv_proj", stacked_rows(q, kv) if c.keys_as_values else stacked_rows(q, kv, kv)
            if c.qk_norm == "whole":
                yield "q_norm", rows(*scaled(c.heads, own, c.head_dim))
                yield "k_norm", rows(*scaled(c.kv_heads, kv_own, c.head_dim))
            yield "sinks", rows(c.heads, own)
            yield "o_proj", columns(*scaled(c.heads, own, c.head_dim))
        case LatentConfig():
            own = shard.range_of(c.heads)
            q = scaled(c.heads, own, c.nope_dim + c.rope_dim)
            yield "q_proj", rows(*q)
            yield "q_b_proj", rows(*q)
            yield "kv_b_proj", rows(*scaled(c.heads, own, c.nope_dim + c.value_dim))
            yield "k_b_proj", rows(*scaled(c.heads, own, c.kv_lora_rank))
            yield "v_b_proj", rows(*scaled(c.heads, own, c.value_dim))
            yield "o_proj", columns(*scaled(c.heads, own, c.value_dim))
        case DeltaNetConfig():
            yield from delta_net_divisions(c, shard)
        case ShortConvConfig():
            own = shard.range_of(c.channels)
            yield "in_proj", stacked_rows(*[(c.channels, own)] * 3)
            yield "conv", rows(c.channels, own)
            yield "out_proj", columns(c.channels, own)


def delta_net_divisions(c: DeltaNetConfig, shard: Shard) -> Iterator[tuple[str, Division]]:
    shares = c.value_heads // c.key_heads
    own = shard.range_of(c.key_heads)
    keys = scaled(c.key_heads, own, c.key_dim)

    def value_rows(width: int) -> list[tuple[int, tuple[int, int]]]:
        """Parts of rows with `width` per value head, in the order in which the heads are stored."""
        if c.tiled:
            return [scaled(c.key_heads, own, width)] * shares
        return [scaled(c.key_heads, own, shares * width)]

    values, heads = value_rows(c.value_dim), value_rows(1)
    yield "in_proj_qkv", stacked_rows(keys, keys, *values)
    yield "conv1d", stacked_rows(keys, keys, *values)
    yield "in_proj_z", stacked_rows(*values)
    yield "in_proj_qkvz", rows(*scaled(c.key_heads, own, 2 * c.key_dim + 2 * shares * c.value_dim))
    yield "in_proj_ba", rows(*scaled(c.key_heads, own, 2 * shares))
    for name in ("in_proj_b", "in_proj_a", "A", "A_log", "dt_bias"):
        yield name, stacked_rows(*heads)
    yield "out_proj", replace(stacked_rows(*values), axis="columns")


def scaled(count: int, own: tuple[int, int], unit: int) -> tuple[int, tuple[int, int]]:
    return count * unit, (own[0] * unit, own[1] * unit)


def rows(total: int, own: tuple[int, int]) -> Division:
    return Division("rows", total, (own,))


def columns(total: int, own: tuple[int, int]) -> Division:
    return Division("columns", total, (own,))


def stacked_rows(*parts: tuple[int, tuple[int, int]]) -> Division:
    """Return the division of a stack: of each part, its rows and those of the rank."""
    begin, segments = 0, []
    for count, (first, end) in parts:
        segments.append((begin + first, begin + end))
        begin += count
    return Division("rows", begin, tuple(segments))
