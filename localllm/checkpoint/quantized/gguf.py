"""Reads a matrix of a GGUF file: `X.weight` in blocks, mapped."""

import torch

from localllm.checkpoint.quantized.mxfp4 import check_exponents
from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.quant.formats import gguf
from localllm.quant.tensor import QuantizedTensor


def take_blocks(weights: Weights, name: str, shape: tuple[int, int], plain: str) -> QuantizedTensor | None:
    """Return the matrix `name` if a GGUF file stores it in another format than `plain` (F32, ...), otherwise None.

    Raises DamagedModel for scales that are NaN or infinite.
    """
    stored = weights.stored_header(f"{name}.weight")
    if stored is None or stored.offset is None or stored.dtype == plain:
        return None
    block_format = stored.dtype.lower()
    rows = weights.take(f"{name}.weight", shape, dtypes=(stored.dtype,))
    rows = rows.view(torch.uint8)
    for scales in gguf.row_scales(rows, block_format):
        check_finite(weights.stored_name(f"{name}.weight"), scales)
    if block_format == "mxfp4_gguf":
        check_exponents(weights.stored_name(f"{name}.weight"), gguf.row_exponents(rows))
    return QuantizedTensor(block_format, shape, {gguf.BLOCKS_PART: rows})
