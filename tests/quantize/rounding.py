"""The simplest quantization of a model, every matrix rounded to nearest, for tests that use the result."""

import torch

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.checkpoint.tensors import Weights
from localllm.plan.weights import is_quantized
from localllm.quant.formats.groups import (
    INT4_MAX,
    INT4_ZERO_POINT,
    expand_groups,
    pack_int4,
    quantize_int8,
    split_groups,
)
from localllm.quant.packing import INT4
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.artefact import Artefact
from localllm.quantize.source import Recipe


def rounded(weight: torch.Tensor, recipe: Recipe) -> QuantizedTensor:
    """Round weight [out, in] to INT4, with or without zero points, or symmetric INT8."""
    rows, columns = weight.shape
    if recipe.bits == 8:
        return quantize_int8(weight, weight.dtype, recipe.group)
    groups = split_groups(weight, recipe.group or columns)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    zero = None
    if recipe.symmetric:
        scale = torch.maximum(-low / 8, high / 7)
    else:
        scale = (high - low) / INT4_MAX
        zero = (-low / scale).round()
    scale = scale.to(weight.dtype)
    steps = weight.float() / expand_groups(scale.float(), recipe.group or columns, columns)
    middle = INT4_ZERO_POINT if zero is None else expand_groups(zero, recipe.group or columns, columns)
    codes = (steps.round() + middle).clamp(0, INT4_MAX).to(torch.uint8)
    parts = {"q": pack_int4(codes), "scale": scale} | ({} if zero is None else {"zero": zero.to(torch.uint8)})
    return QuantizedTensor(INT4, (rows, columns), parts, recipe.group)


def quantized_parts(header: Header, recipe: Recipe) -> dict[str, dict[str, QuantizedTensor]]:
    """Quantize the matrices of all layers according to the recipe, by layer, and the head to INT8."""
    weights, config = Weights(header), parse_config(header.config)
    parts: dict[str, dict[str, QuantizedTensor]] = {}
    for name, entry in header.tensors.items():
        if not is_quantized(name, entry, config):
            continue
        weight = weights.take(name, entry.shape)
        if name.startswith("layers."):
            parts.setdefault(".".join(name.split(".")[:2]), {})[name] = rounded(weight, recipe)
        else:
            parts["head"] = {"lm_head.weight": quantize_int8(weight, weight.dtype)}
    return parts


def write_rounded(artefact: Artefact) -> None:
    for part, tensors in quantized_parts(artefact.header, artefact.recipe).items():
        if part not in artefact.done:
            artefact.write(part, tensors)
    artefact.finish()
