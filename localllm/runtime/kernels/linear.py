"""y = x W^T + bias, where W is dense or quantized.

Decoding reads every weight once per token, so that this operation takes bytes(W) / bandwidth: packed weights are
read as they are. Many rows of x are bound by multiplications; W is then dequantized, some of its rows at a time.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.hardware.device import dtype_name
from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf
from localllm.quant.formats.groups import quantize_activations
from localllm.quant.packing import INTERLEAVED_BITS, PANEL_ROWS, W8A8
from localllm.quant.tensor import QuantizedTensor, no_op
from localllm.runtime.kernels import batch_invariance
from localllm.runtime.kernels.cpu import dense_matmul, quantized_matmul
from localllm.runtime.kernels.cpu.compile import cpu_supported
from localllm.runtime.kernels.cpu.interleave import interleave_weights
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kernels.threads import run_in_parts

# 1 MB of float32 in L2; q4_k, one row of x, 4096 x 4096: 2**16 63 ms, 2**18 30, all at once 88.
TILE_ELEMENTS = 2**18


def linear(x: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias. x: [..., in]; weight: [out, in]; bias: [out] -> [..., out]"""
    if isinstance(weight, Tensor):
        return choose("plain_linear", x, weight, bias).run(x, weight, bias)
    return choose("linear", x, weight, bias).run(x, weight, bias)


def prepare_weights(
    *weights: Tensor | QuantizedTensor,
    dtype: torch.dtype | None = None,
    on_read: Callable[[], None] = no_op,
    activation_bits: int | None = None,
) -> tuple[Tensor | QuantizedTensor, ...]:
    """Return weights that are multiplied with the same x in the layout that this device's kernels prefer.

    The values are unchanged, in as few tensors as possible. dtype: of x if known, to start compiling its kernels;
    on_read: see `interleaved.interleave`; activation_bits: see `QuantizedTensor`.
    """
    packed = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    stacked = apply_layout(packed, dtype, on_read) if packed and len(packed) == len(weights) else None
    prepared = (
        (stacked,) if stacked is not None else tuple(prepare_weight(weight, dtype, on_read) for weight in weights)
    )
    prepared = tuple(
        replace(weight, activation_bits=activation_bits) if isinstance(weight, QuantizedTensor) else weight
        for weight in prepared
    )
    for weight in prepared:
        if dtype and isinstance(weight, QuantizedTensor) and weight.format in INTERLEAVED_BITS:
            quantized_matmul.compile_ahead(weight, dtype)
    return prepared


def prepare_weight(
    weight: Tensor | QuantizedTensor, dtype: torch.dtype | None, between: Callable[[], None]
) -> Tensor | QuantizedTensor:
    if isinstance(weight, Tensor):
        return weight.contiguous() if weight.is_cpu else weight  # experts may be stored column by column
    prepared = apply_layout([weight], dtype, between)
    return weight if prepared is None else prepared


def apply_layout(
    weights: list[QuantizedTensor], dtype: torch.dtype | None, between: Callable[[], None]
) -> Tensor | QuantizedTensor | None:
    """Return the weights stacked in a kernel's layout; None if it reads them as they are, or not stacked."""
    return choose("layout", weights[0]).run(weights, dtype, between)


def interleave_unsupported(weight: QuantizedTensor) -> str | None:
    return None if cpu_supported() and is_on_cpu(weight) else "no kernel is compiled for it"


@kernel("layout", "cpu-interleaved", interleave_unsupported)
def interleave_layout(
    weights: list[QuantizedTensor], dtype: torch.dtype | None, between: Callable[[], None]
) -> QuantizedTensor | None:
    return interleave_weights(*weights, on_read=between)


@kernel("layout", "as stored")
def keep_layout(weights: list[QuantizedTensor], dtype: torch.dtype | None, between: Callable[[], None]) -> None:
    """Keep the weights as stored, because no kernel needs another layout."""


def is_on_cpu(weight: QuantizedTensor) -> bool:
    return all(part.device.type == "cpu" for part in weight.parts.values())


def interleaved_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if weight.format not in INTERLEAVED_BITS:
        return f"the weight is {weight.format}"
    if x.device.type != "cpu":
        return f"x is on {x.device}"
    return None if x.dtype in quantized_matmul.PLANES_BY_DTYPE else f"x is {dtype_name(x.dtype)}"


def interleaved_integers_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if reason := interleaved_unsupported(x, weight, bias):
        return reason
    rows = x.shape[:-1].numel()
    if rows <= quantized_matmul.MAX_ROWS or batch_invariance.batch_invariant():
        return None
    faster = quantized_matmul.integers_are_faster(weight, x.dtype)
    return None if faster else f"{rows} rows: dequantizing first is faster"


@kernel("linear", "cpu-interleaved", interleaved_integers_unsupported)
def linear_interleaved(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return flatten_rows(quantized_matmul.matmul_integers, x, weight, bias)


@kernel("linear", "cpu-interleaved-dequantized", interleaved_unsupported)
def linear_interleaved_dequantized(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return flatten_rows(quantized_matmul.matmul_dequantized, x, weight, bias)


def flatten_rows(
    product: Callable[[Tensor, QuantizedTensor], Tensor], x: Tensor, weight: QuantizedTensor, bias: Tensor | None
) -> Tensor:
    """Call a product that takes x as [M, in] with x of any number of dimensions."""
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = product(rows, weight)
    y = y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def gguf_tiles_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if x.device.type != "cpu":
        return "tiles only save cache of a CPU"
    return None if weight.format in gguf.FORMATS else f"the weight is {weight.format}"


@kernel("linear", "gguf-tiles", gguf_tiles_unsupported)
def linear_gguf_tiles(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Process a few rows of W at a time, so that dequantized rows are used before they leave the cache."""
    rows, count = weight.parts[gguf.BLOCKS_PART], weight.shape[0]
    tile = max(1, TILE_ELEMENTS // weight.shape[1])
    y = x.new_empty(*x.shape[:-1], count)

    def multiply_tiles(part: int, parts: int) -> None:
        for begin in range(part * tile, count, parts * tile):
            w = gguf.dequantize_rows(rows[begin : begin + tile], weight.format, x.dtype)
            y[..., begin : begin + tile] = linear(x, w)

    run_in_parts(multiply_tiles)
    return y if bias is None else y + bias


def w8a8_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    return None if weight.format == W8A8 else f"the weight is {weight.format}"


def w8a8_cpu_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    # On GPUs, torch's product needs more than 16 rows, and multiples of 8.
    return w8a8_unsupported(x, weight, bias) or (None if is_on_cpu(weight) else "the weight is on a GPU")


@kernel("linear", "cpu-w8a8", w8a8_cpu_unsupported)
def linear_w8a8(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Compute with integers, exactly like the reference.

    4096 x 4096, 1 row: 2.4 ms instead of 24; 512 rows: 10 ms instead of 99.
    """
    return flatten_rows(int8_matmul, x, weight, bias)


def int8_matmul(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Quantize x and multiply. x: [M, in] -> [M, out]"""
    tokens, scale = quantize_activations(x)
    product = torch.ops.aten._int_mm(tokens.to(torch.int8), weight.parts["q"].T).float()
    return (product * scale * weight.parts["scale"][:, 0].float()).to(x.dtype)


@kernel("linear", "w8a8-reference", w8a8_unsupported)
def linear_w8a8_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    tokens, scale = quantize_activations(x)
    product = F.linear(tokens, weight.parts["q"].float())  # of integers
    y = (product * scale * weight.parts["scale"][:, 0].float()).to(x.dtype)
    return y if bias is None else y + bias


def cpu_dequantized_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if not (x.is_cpu and cpu_supported()):
        return "no kernel is compiled for it"
    has_kernel = weight.format in INTERLEAVED_BITS or weight.format in gguf.FORMATS or weight.format == W8A8
    return f"the weight is {weight.format}" if has_kernel else None


@kernel("linear", "cpu-dequantized", cpu_dequantized_unsupported)
def linear_dequantized(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Dequantize and multiply as with dense weights: a few rows give each row the bits that it has alone."""
    return linear(x, dequantize(weight, x.dtype), bias)


@kernel("linear", "reference")
def linear_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, dequantize(weight, x.dtype), bias)


def dense_rows_unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if reason := dense_matmul.unsupported(x, weight):
        return reason
    rows = x.numel() // weight.shape[1]
    supported = rows <= dense_matmul.MAX_ROWS or batch_invariance.batch_invariant()
    return None if supported else f"{rows} rows: torch's own product is faster"


@kernel("plain_linear", "cpu-rows", dense_rows_unsupported)
def dense_linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = dense_matmul.matmul(x, weight)
    return y if bias is None else y + bias


def widened_unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if not x.is_cpu or x.dtype != torch.float32:
        return f"x is {dtype_name(x.dtype)} on {x.device}"
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return None if narrow else f"the weight is {dtype_name(weight.dtype)}"


@kernel("plain_linear", "cpu-widened", widened_unsupported)
def dense_linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Widen PANEL_ROWS rows of W at a time to float32."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = x.new_empty(len(rows), len(weight))
    scratch = x.new_empty(min(PANEL_ROWS, len(weight)), weight.shape[1])
    for begin in range(0, len(weight), PANEL_ROWS):
        part = weight[begin : begin + PANEL_ROWS]
        panel = scratch[: len(part)].copy_(part)
        torch.mm(rows, panel.T, out=y[:, begin : begin + len(part)])
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


@kernel("plain_linear", "reference")
def dense_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with dense weights."""
    return F.linear(x, weight.to(x.dtype), bias)
