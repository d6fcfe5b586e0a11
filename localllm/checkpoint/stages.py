"""The tensors of one process among several: those of its pipeline stage, or the parts of them that it reads.

Layers keep their index in the names of tensors, so that errors and plans name those of the files.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from localllm.arch.config import ModelConfig, Stage
from localllm.arch.shard import check_experts
from localllm.arch.stages import Position, divide_layers, stage_config
from localllm.checkpoint.header import Header
from localllm.checkpoint.shards import shard_model

LAYER_NAME = re.compile(r"layers\.(\d+)\.")


def layer_of(name: str, count: int) -> int | None:
    """Return the layer that a tensor is of; None for those outside of the `count` layers."""
    match = LAYER_NAME.match(name)
    return int(match[1]) if match and int(match[1]) < count else None


def divide_model(header: Header, config: ModelConfig, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the borders of pipeline stages with these shares of the stored bytes: see `divide_layers`."""
    layer_bytes, outside_bytes = [0] * len(config.layers), 0
    for name, tensor in header.tensors.items():
        if config.tie_embeddings and name.startswith("lm_head."):
            continue  # stored twice, read once
        layer = layer_of(name, len(config.layers))
        if layer is None:
            outside_bytes += tensor.nbytes
        else:
            layer_bytes[layer] += tensor.nbytes
    return divide_layers(config, layer_bytes, outside_bytes, shares)


def stage_model(header: Header, config: ModelConfig, stage: Stage) -> tuple[Header, ModelConfig]:
    """Return the header and the configuration of a stage of the model."""

    def belongs(name: str) -> bool:
        layer = layer_of(name, len(config.layers))
        return stage.index == 0 if layer is None else stage.first <= layer < stage.end

    tensors = {name: tensor for name, tensor in header.tensors.items() if belongs(name)}
    return replace(header, tensors=tensors), stage_config(config, stage)


def part_of_model(header: Header, config: ModelConfig, position: Position) -> tuple[Header, ModelConfig]:
    """Return the header and the configuration of what one process has.

    Raises UnsupportedModel for families and formats that tensor parallelism cannot divide so.
    """
    check_experts(config, position.shard)
    if position.stage:
        header, config = stage_model(header, config, position.stage)
    return shard_model(header, config, position.shard) if position.tensor_size > 1 else (header, config)
