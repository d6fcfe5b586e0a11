"""Weights of a checkpoint that are stored quantized: which layouts run, and one matrix as it lies on disk.

compressed-tensors `int-quantized`, weights only: `X.weight` int8 [out, in], `X.weight_scale` [out, 1].
GGUF: `X.weight` in blocks, as mapped.
gpt-oss's MXFP4: `X.blocks` uint8 [out, in / 32, 16], `X.scales` uint8 [out, in / 32].
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localllm.arch.fields import Fields
from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.errors import DamagedModel, UnsupportedModel
from localllm.quant.formats import gguf, int8, mxfp4
from localllm.quant.tensor import QuantizedTensor

INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where config.json describes a quantization that does not run, DamagedModel for
    nonsense. Which matrices are quantized, their tensors tell."""
    if not Fields(config).has("quantization_config"):
        return
    layout = Fields(config).part("quantization_config")
    method, kind = layout.text("quant_method", ""), layout.text("format", "")
    groups = layout.part("config_groups")
    if method == "mxfp4":
        return
    runs = (method, kind) == ("compressed-tensors", "int-quantized") and bool(groups.values)
    for name in groups.values:
        group = groups.part(name)
        weights = group.part("weights").values
        runs &= not group.has("input_activations") and not group.has("output_activations")
        runs &= all(weights.get(field) == value for field, value in INT8_WEIGHTS.items())
    if not runs:
        raise UnsupportedModel(
            f"the quantization {f'{method} {kind}'.strip()!r} is not supported",
            "compressed-tensors int-quantized, weight-only INT8 per channel, and MXFP4 are",
        )


def take_quantized(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    """The matrix `name` if it is stored quantized, else None."""
    return take_int8(weights, name, shape) or take_mxfp4(weights, name, shape)


def take_blocks(weights: Weights, name: str, shape: tuple[int, int], plain: str) -> QuantizedTensor | None:
    """The matrix `name` if a GGUF file holds it in anything but `plain` (F32, ...), else None.

    Raises DamagedModel for scales that are NaN or infinite.
    """
    stored = weights.stored(f"{name}.weight")
    if stored is None or stored.offset is None or stored.dtype == plain:
        return None
    form = stored.dtype.lower()
    rows = weights.take(f"{name}.weight", shape, dtypes=(stored.dtype,))
    rows = rows.view(torch.uint8)
    for scales in gguf.row_scales(rows, form):
        check_finite(f"{weights.prefix}{name}.weight", scales)
    if form == "mxfp4_gguf":
        check_exponents(f"{weights.prefix}{name}.weight", gguf.row_exponents(rows))
    return QuantizedTensor(form, shape, {gguf.PART: rows})


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    if not weights.has(f"{name}.blocks"):
        return None
    rows, groups = shape[0], -(-shape[1] // mxfp4.GROUP)
    blocks = weights.take(f"{name}.blocks", (rows, groups, mxfp4.GROUP // 2), dtypes=("U8",))
    scales = weights.take(f"{name}.scales", (rows, groups), dtypes=("U8",))
    check_exponents(f"{weights.prefix}{name}", scales)
    return QuantizedTensor(mxfp4.FORMAT, shape, {"q": blocks, "scale": scales})


def check_exponents(name: str, exponents: Tensor) -> None:
    """MXFP4 knows no infinite scale, and one NaN."""
    if (exponents == mxfp4.NAN).any():
        raise DamagedModel(f"the scales of {name!r} hold a NaN", "fetch the model again")


def take_int8(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    if not weights.has(f"{name}.weight_scale"):
        return None
    scale = weights.take(f"{name}.weight_scale", (shape[0], 1))
    q = weights.take(f"{name}.weight", shape, dtypes=("I8",))
    return QuantizedTensor(int8.FORMAT, shape, {"q": q, "scale": scale[:, 0]})
