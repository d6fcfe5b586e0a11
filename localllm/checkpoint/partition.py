"""The partition of a model that one process has: the layers of its pipeline stage, and of them the parts that its
tensor-parallel rank computes, as the header and the configuration of a smaller model.

Everything that works on headers follows: shapes are checked against the partition's configuration, plans count its
bytes, and only its parts of the files are read. Layers keep their index in the names of tensors, so that errors
and plans name those of the files. Quantized matrices are divided at the borders of their groups and words.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from localllm.arch.config import ModelConfig, Stage
from localllm.arch.shard import (
    Division,
    Segments,
    Shard,
    check_experts,
    division_of,
    is_elsewhere,
    shard_config,
)
from localllm.arch.stages import Position, divide_layers, stage_config
from localllm.checkpoint.header import Header, TensorHeader, TensorPart
from localllm.errors import UnsupportedModel
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME

LAYER_NAME = re.compile(r"layers\.(\d+)\.")
CODES_PER_WORD = (1, 4, 8)  # of bytes, and of words with 8 or 4 bits per code
MXFP4_GROUP = 32  # columns
# Optional tensors with facts of the whole matrix: its shape, and a group of each column that the order implies.
WHOLE_SHAPE, GROUP_INDEX = "weight_shape", ("g_idx", "weight_g_idx")
SINGLE_TENSORS = ("sinks", "A", "A_log", "dt_bias")


def part_of_model(header: Header, config: ModelConfig, position: Position) -> tuple[Header, ModelConfig]:
    """Return the header and the configuration of what one process has.

    Raises UnsupportedModel for families and formats that tensor parallelism cannot divide so.
    """
    check_experts(config, position.shard)
    if position.stage:
        header, config = stage_model(header, config, position.stage)
    return shard_model(header, config, position.shard) if position.tensor_size > 1 else (header, config)


def stage_model(header: Header, config: ModelConfig, stage: Stage) -> tuple[Header, ModelConfig]:
    """Return the header and the configuration of a stage of the model."""

    def belongs(name: str) -> bool:
        layer = layer_of(name, len(config.layers))
        return stage.index == 0 if layer is None else stage.first <= layer < stage.end

    tensors = {name: tensor for name, tensor in header.tensors.items() if belongs(name)}
    return replace(header, tensors=tensors), stage_config(config, stage)


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


def layer_of(name: str, count: int) -> int | None:
    """Return the layer that a tensor is of; None for those outside of the `count` layers."""
    match = LAYER_NAME.match(name)
    return int(match[1]) if match and int(match[1]) < count else None


def shard_model(header: Header, config: ModelConfig, shard: Shard) -> tuple[Header, ModelConfig]:
    """Return the header and the configuration of one rank. What cannot be divided by columns is divided by rows
    alone.

    Raises UnsupportedModel for families and formats that cannot be divided so.
    """
    local_config = shard_config(config, shard)
    try:
        return replace(header, tensors=shard_tensors(header, config, shard)), local_config
    except UnsupportedModel as error:
        try:
            tensors = shard_tensors(header, config, replace(shard, by_rows=True))
        except UnsupportedModel:
            raise error from None
        return replace(header, tensors=tensors, by_rows=True), local_config


def shard_tensors(header: Header, config: ModelConfig, shard: Shard) -> dict[str, TensorHeader]:
    quantization = header.quantization_config
    if quantization and quantization.activations and not shard.by_rows:
        raise UnsupportedModel(
            "weights whose activations are quantized to 8 bits cannot be divided by columns",
            "leave out --tensor-parallel, or use another quantization",
        )
    parts = {name: shard_tensor(name, each, header, config, shard) for name, each in header.tensors.items()}
    return {name: part for name, part in parts.items() if part}


def shard_tensor(
    name: str, tensor: TensorHeader, header: Header, config: ModelConfig, shard: Shard
) -> TensorHeader | None:
    """Return the rank's part of a tensor; None for one of another rank, or one that only describes the whole."""
    if is_elsewhere(name, config, shard):
        return None
    module, _, suffix = name.rpartition(".")
    if suffix in SINGLE_TENSORS:
        module, suffix = name, "weight"
    division = division_of(module, config, shard)
    if division is None:
        return tensor
    if suffix == WHOLE_SHAPE:
        return None
    if division.axis == "columns":
        if suffix == "bias":
            return tensor
        if suffix in GROUP_INDEX:
            if header.quantization_config and header.quantization_config.act_order:
                raise refused(tensor, "its columns are stored in another order", shard, never=True)
            return None
    if f"{module}.qweight" in header.tensors:  # AWQ and GPTQ store the columns first
        dim = 1 if division.axis == "rows" else 0
    else:
        dim = 0 if division.axis == "rows" else 1
    if suffix in GROUP_INDEX or dim >= len(tensor.shape) or tensor.shape[dim] == 1:
        return tensor  # shared by all rows or columns
    segments = divide_extent(tensor, dim, suffix, division, header, shard)
    shape = list(tensor.shape)
    shape[dim] = sum(end - begin for begin, end in segments)
    local = replace(tensor, shape=tuple(shape))
    if tensor.interleaved:  # rows of gate and up alternate in the file: one range holds both
        segments = ((2 * segments[0][0], 2 * segments[0][1]),)
    if tensor.heads is not None:
        heads, size = tensor.heads
        local = replace(local, heads=(heads * shape[0] // tensor.shape[0], size))
    return replace(local, part=TensorPart(dim, segments, tensor.shape))


def divide_extent(
    tensor: TensorHeader, dim: int, suffix: str, division: Division, header: Header, shard: Shard
) -> Segments:
    """Return the segments of one dimension of a tensor, in which several rows or columns may share an element."""
    extent, total = tensor.shape[dim], division.total
    if tensor.offset is not None:
        units = [1]
        if dim == len(tensor.shape) - 1 and dim > 0:
            block = BLOCK_TYPE_BY_NAME[tensor.dtype.lower()].block_elements
            if any(border % block for segment in division.segments for border in segment):
                raise refused(tensor, f"{total} columns are stored in blocks of {block}", shard)
    else:
        units = [unit for unit in sharing_units(suffix, division, header) if -(-total // unit) == extent]
    for unit in dict.fromkeys(units):
        if any(border % unit for segment in division.segments for border in segment):
            raise refused(tensor, f"{total} {division.axis} are stored in groups of {unit}", shard)
    if len(set(units)) != 1:
        raise refused(tensor, f"its shape {list(tensor.shape)} does not say which {division.axis} it holds", shard)
    return tuple((begin // units[0], end // units[0]) for begin, end in division.segments)


def sharing_units(suffix: str, division: Division, header: Header) -> list[int]:
    """Return how many rows or columns may share an element of a tensor."""
    if suffix in ("weight", "bias"):
        return [1]
    units: list[int]
    if suffix in ("weight_packed", "qweight", "qzeros", "weight_zero_point") and (
        division.axis == "columns" or suffix != "weight_packed"
    ):
        units = [*CODES_PER_WORD]
    else:
        units = [1]
    if division.axis == "columns" and suffix in ("qzeros", "weight_zero_point"):
        units = []
    quantization = header.quantization_config
    if quantization and suffix not in ("weight_packed", "qweight"):
        for scheme in quantization.schemes:
            if division.axis == "columns" and scheme.group_size:
                units.append(scheme.group_size)
            if division.axis == "rows" and scheme.rows > 1:
                units.append(scheme.rows)
    if suffix in ("blocks", "scales") and division.axis == "columns":
        units.append(MXFP4_GROUP)
    return units


def refused(tensor: TensorHeader, why: str, shard: Shard, *, never: bool = False) -> UnsupportedModel:
    """Return the error for a tensor that cannot be divided. never: among no number of processes"""
    is_expert = tensor.expert is not None or ".experts." in tensor.name
    remedies = [
        f"{'leave out' if never else 'use another number with'} --tensor-parallel",
        *(["divide the experts with --expert-parallel"] if is_expert and not shard.whole_experts else []),
        "use a model in 16 bits",
    ]
    return UnsupportedModel(
        f"the tensor {tensor.name!r} cannot be divided among {shard.size} processes: {why}",
        f"{', '.join(remedies[:-1])}, or {remedies[-1]}",
    )
