"""Weights of a checkpoint that are stored quantized: which layouts run, and one matrix as it lies on disk.

compressed-tensors `int-quantized`, weights only: `X.weight` int8 [out, in], `X.weight_scale` [out, 1].
"""

from collections.abc import Mapping
from typing import Any

from localllm.arch.fields import Fields
from localllm.checkpoint.safetensors import Weights
from localllm.errors import UnsupportedModel
from localllm.quant.formats import int8
from localllm.quant.tensor import QuantizedTensor

INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def is_int8(config: Mapping[str, Any]) -> bool:
    """Does config.json say that matrices are stored as INT8? False: nothing is quantized.

    Raises UnsupportedModel where it describes a quantization that does not run, DamagedModel for nonsense.
    """
    if not Fields(config).has("quantization_config"):
        return False
    layout = Fields(config).part("quantization_config")
    method, kind = layout.text("quant_method", ""), layout.text("format", "")
    groups = layout.part("config_groups")
    runs = (method, kind) == ("compressed-tensors", "int-quantized") and bool(groups.values)
    for name in groups.values:
        group = groups.part(name)
        weights = group.part("weights").values
        runs &= not group.has("input_activations") and not group.has("output_activations")
        runs &= all(weights.get(field) == value for field, value in INT8_WEIGHTS.items())
    if not runs:
        raise UnsupportedModel(
            f"the quantization {f'{method} {kind}'.strip()!r} is not supported",
            "compressed-tensors int-quantized, weight-only INT8 per channel, is",
        )
    return True


def take_int8(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    """The matrix `name` if it is stored as INT8, else None."""
    if not weights.has(f"{name}.weight_scale"):
        return None
    scale = weights.take(f"{name}.weight_scale", (shape[0], 1))
    q = weights.take(f"{name}.weight", shape, dtypes=("I8",))
    return QuantizedTensor(int8.FORMAT, shape, {"q": q, "scale": scale[:, 0]})
