"""Reads a matrix of a GGUF file: `X.weight` in blocks, mapped."""

import torch
from torch import Tensor

from localllm.checkpoint.tensors import Weights, check_finite
from localllm.errors import DamagedModel
from localllm.quant.formats import gguf
from localllm.quant.formats.groups import MXFP4_GROUP, MXFP4_NAN_SCALE
from localllm.quant.packing import MXFP4
from localllm.quant.tensor import QuantizedTensor

# gpt-oss's MXFP4: `X.blocks` uint8 [out, in / 32, 16], `X.scales` uint8 [out, in / 32].


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor:
    rows, groups = shape[0], -(-shape[1] // MXFP4_GROUP)
    blocks = weights.take(f"{name}.blocks", (rows, groups, MXFP4_GROUP // 2), dtypes=("U8",))
    scales = weights.take(f"{name}.scales", (rows, groups), dtypes=("U8",))
    check_exponents(weights.stored_name(f"{name}.scales"), scales)
    return QuantizedTensor(MXFP4, shape, {"q": blocks, "scale": scales})


def check_exponents(name: str, exponents: Tensor) -> None:
    """Raise DamagedModel if a scale is NaN. MXFP4 has no infinite scale."""
    if (exponents == MXFP4_NAN_SCALE).any():
        raise DamagedModel(f"the tensor {name!r} has a scale that is NaN", "fetch the model again")


def take_blocks(weights: Weights, name: str, shape: tuple[int, int], plain: str) -> QuantizedTensor | None:
    """Return the matrix `name` if a GGUF file stores it in a format other than `plain` (F32, ...), otherwise None.

    Its scales are not checked: see `check_blocks`.
    """
    stored = weights.stored_header(f"{name}.weight")
    if stored is None or stored.offset is None or stored.dtype == plain:
        return None
    block_format = stored.dtype.lower()
    rows = weights.take(f"{name}.weight", shape, dtypes=(stored.dtype,))
    return QuantizedTensor(block_format, shape, {gguf.BLOCKS_PART: rows.view(torch.uint8)})


def check_blocks(name: str, weight: QuantizedTensor) -> None:
    """Raise DamagedModel if a matrix in blocks has scales that are NaN or infinite. name: of its tensor"""
    rows = weight.parts[gguf.BLOCKS_PART]
    for scales in gguf.row_scales(rows, weight.format):
        check_finite(name, scales)
    if weight.format == "mxfp4_gguf":
        check_exponents(name, gguf.row_exponents(rows))
