"""y = x W^T + bias, where W is plain or quantized.

Decode reads every weight once a token, so the time of this operation is bytes(W) / bandwidth. On the CPU the
INT8 kernel of torch converts while it reads, but only for bfloat16 x: with float32 x it is 15 times slower than
its bfloat16 path (4096 x 4096, one row). Rows must be whole vectors of 16: it reads past the end of others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.device import dtype_name
from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf, int8, w8a8
from localllm.quant.packing import VECTOR, reads_packed
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kernels.threads import in_parts

ROWS_WORTH_DEQUANTIZING = 192  # 128 rows: 27 ms packed, 35 ms dequantized; 256 rows: 54 and 44 (4096 x 4096)
TILE_ELEMENTS = 2**18  # 1 MB of float32 in L2; q4_k, one row of x: 2**16 63 ms, 2**18 30, whole 88 (4096 x 4096)


def linear(x: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., in]; weight: [out, in]; bias: [out] -> [..., out]"""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return choose("linear", x, weight, bias).run(x, weight, bias)


def few_bfloat16_rows_on_cpu(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if weight.format != int8.FORMAT:
        return f"the weight is {weight.format}"
    if weight.parts["scale"].shape[1] > 1 or len(weight.parts) > 2:
        return "its rows have groups, zero points or an order"
    if not reads_packed(weight.format, x.shape[-1], dtype_name(x.dtype), x.device.type):
        return f"{x.shape[-1]} columns of {x.dtype} on {x.device.type}, not bfloat16 in vectors of {VECTOR} on cpu"
    rows = x.numel() // x.shape[-1]
    return f"{rows} rows: dequantizing first is faster" if rows >= ROWS_WORTH_DEQUANTIZING else None


@kernel("linear", "torch-int8-cpu", few_bfloat16_rows_on_cpu)
def linear_int8_cpu(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    q, scale = weight.parts["q"], weight.parts["scale"][:, 0].to(x.dtype)
    y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), q, scale).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def packed_in_blocks(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if x.device.type != "cpu":
        return "the device has no cache to be spared"
    return None if weight.format in gguf.FORMATS else f"the weight is {weight.format}"


@kernel("linear", "gguf-tiles", packed_in_blocks)
def linear_gguf_tiles(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """A few rows of W at a time, so that what was dequantized is used before it leaves the cache."""
    rows, count = weight.parts[gguf.PART], weight.shape[0]
    tile = max(1, TILE_ELEMENTS // weight.shape[1])
    y = x.new_empty(*x.shape[:-1], count)

    def some(part: int, parts: int) -> None:
        for begin in range(part * tile, count, parts * tile):
            w = gguf.dequantize_rows(rows[begin : begin + tile], weight.format, x.dtype)
            y[..., begin : begin + tile] = F.linear(x, w)

    in_parts(some)
    return y if bias is None else y + bias


def eight_bit_products(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    return None if weight.format == w8a8.FORMAT else f"the weight is {weight.format}"


@kernel("linear", "w8a8-reference", eight_bit_products)
def linear_w8a8_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    tokens, scale = w8a8.quantize_tokens(x)
    products = F.linear(tokens, weight.parts["q"].float())  # of whole numbers
    y = (products * scale * weight.parts["scale"][:, 0].float()).to(x.dtype)
    return y if bias is None else y + bias


@kernel("linear", "reference")
def linear_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, dequantize(weight, x.dtype), bias)
