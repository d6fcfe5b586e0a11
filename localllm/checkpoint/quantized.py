"""Weights of a checkpoint that are stored quantized: one matrix as it lies on disk.

compressed-tensors `int-quantized`, weights only: `X.weight` int8 [out, in], `X.weight_scale` [out, 1].
GGUF: `X.weight` in blocks, as mapped.
gpt-oss's MXFP4: `X.blocks` uint8 [out, in / 32, 16], `X.scales` uint8 [out, in / 32].
"""

import torch
from torch import Tensor

from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.errors import DamagedModel
from localllm.quant.formats import gguf, int8, mxfp4
from localllm.quant.tensor import QuantizedTensor


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
        check_finite(weights.spelled(f"{name}.weight"), scales)
    if form == "mxfp4_gguf":
        check_exponents(weights.spelled(f"{name}.weight"), gguf.row_exponents(rows))
    return QuantizedTensor(form, shape, {gguf.PART: rows})


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    if not weights.has(f"{name}.blocks"):
        return None
    rows, groups = shape[0], -(-shape[1] // mxfp4.GROUP)
    blocks = weights.take(f"{name}.blocks", (rows, groups, mxfp4.GROUP // 2), dtypes=("U8",))
    scales = weights.take(f"{name}.scales", (rows, groups), dtypes=("U8",))
    check_exponents(weights.spelled(f"{name}.scales"), scales)
    return QuantizedTensor(mxfp4.FORMAT, shape, {"q": blocks, "scale": scales})


def check_exponents(name: str, exponents: Tensor) -> None:
    """MXFP4 has no infinite scale, and one that is NaN."""
    if (exponents == mxfp4.NAN).any():
        raise DamagedModel(f"the tensor {name!r} has a scale that is NaN", "fetch the model again")


def take_int8(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    if not weights.has(f"{name}.weight_scale"):
        return None
    scale = weights.take(f"{name}.weight_scale", (shape[0], 1))
    q = weights.take(f"{name}.weight", shape, dtypes=("I8",))
    return QuantizedTensor(int8.FORMAT, shape, {"q": q, "scale": scale})
