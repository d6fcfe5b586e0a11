"""Weights of a checkpoint that are stored quantized: which layouts run, and one matrix as it lies on disk.

compressed-tensors `int-quantized`, weights only: `X.weight` int8 [out, in], `X.weight_scale` [out, 1].
"""

from collections.abc import Mapping
from typing import Any

from localllm.checkpoint.safetensors import Weights
from localllm.errors import UnsupportedModel
from localllm.quant.formats import int8
from localllm.quant.tensor import QuantizedTensor

INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def check_layout(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where config.json describes a quantization that does not run."""
    layout = config.get("quantization_config")
    if layout is None:
        return
    method, kind = layout.get("quant_method"), layout.get("format")
    groups = list(layout.get("config_groups", {}).values())
    runs = method == "compressed-tensors" and kind == "int-quantized" and bool(groups)
    for group in groups:
        weights = group.get("weights") or {}
        runs &= not group.get("input_activations") and not group.get("output_activations")
        runs &= all(weights.get(field) == value for field, value in INT8_WEIGHTS.items())
    if not runs:
        raise UnsupportedModel(
            f"the quantization {method} {kind or ''}".rstrip() + " is not supported",
            "compressed-tensors int-quantized, weight-only INT8 per channel, is",
        )


def take_int8(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    """The matrix `name` if it is stored as INT8, else None."""
    if not weights.has(f"{name}.weight_scale"):
        return None
    scale = weights.take(f"{name}.weight_scale", (shape[0], 1))
    q = weights.take(f"{name}.weight", shape)
    return QuantizedTensor(int8.FORMAT, shape, {"q": q, "scale": scale[:, 0]})
