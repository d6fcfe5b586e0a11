"""The stages of a pipeline: consecutive layers, divided so that the largest stage is as small as possible."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.arch.shard import LAYER
from localllm.checkpoint.header import Header
from localllm.errors import UnsupportedModel, UsageError

REMEDY = "use fewer stages with --pipeline-parallel"


@dataclass(frozen=True)
class Stage:
    """The layers of one stage. Its header has the names of the whole model, and its tensors alone."""

    begin: int
    end: int
    header: Header
    config: ModelConfig


def stages_of(header: Header, config: ModelConfig, count: int) -> list[Stage]:
    """Return the stages of a model: the embedding is in the first, the head in the last.

    Raises UsageError for more stages than layers, UnsupportedModel for a model whose layers read what others have
    stored.
    """
    if count > len(config.layers):
        raise UsageError(f"{count} stages are more than the {len(config.layers)} layers", REMEDY)
    sources = [layer.mixer.kv_source for layer in config.layers if isinstance(layer.mixer, AttentionConfig)]
    if config.encoder or config.per_layer or any(source is not None for source in sources):
        raise UnsupportedModel("this model cannot be divided by layers", "leave out --pipeline-parallel")
    stages = []
    for begin, end in split_layers(layer_bytes(header, config), count):
        tensors = {name: tensor for name, tensor in header.tensors.items() if is_in(name, config, begin, end)}
        layers = config.layers[begin:end]
        stages.append(Stage(begin, end, replace(header, tensors=tensors), replace(config, layers=layers)))
    return stages


def is_in(name: str, config: ModelConfig, begin: int, end: int) -> bool:
    """Return whether a stage with these layers needs a tensor."""
    if match := LAYER.fullmatch(name):
        return begin <= int(match[1]) < end
    if name.startswith("embed_tokens."):
        return begin == 0 or (config.tie_embeddings and end == len(config.layers))
    return end == len(config.layers)


def layer_bytes(header: Header, config: ModelConfig) -> list[int]:
    """Return the stored bytes of each layer: the embedding counts in the first, the head in the last."""
    count = len(config.layers)
    totals = [0] * count
    for name, tensor in header.tensors.items():
        match = LAYER.fullmatch(name)
        for layer in {int(match[1])} if match else {0, count - 1}:
            if layer < count and is_in(name, config, layer, layer + 1):
                totals[layer] += tensor.nbytes
    return totals


def split_layers(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each of `count` stages, of which the largest is as small as possible.

    sizes: bytes of each layer
    """

    def fits(limit: int) -> bool:
        stages, filled = 1, 0
        for size in sizes:
            stages, filled = (stages, filled + size) if filled + size <= limit else (stages + 1, size)
        return stages <= count

    lowest, highest = max(sizes), sum(sizes)
    limit = lowest + bisect.bisect_left(range(lowest, highest + 1), True, key=fits)
    ranges, begin = [], 0
    for stage in range(count):
        end, filled, later = begin, 0, count - stage - 1
        while end < len(sizes) - later and (end == begin or filled + sizes[end] <= limit):
            filled, end = filled + sizes[end], end + 1
        ranges.append((begin, end))
        begin = end
    return ranges
