"""Dequantizes packed weights and multiplies them with cuBLAS, for many rows of x.

With so many rows, multiplying takes longer than reading, and tensor cores gain more than unpacking costs.

w[o, i] = (code - zero) * scale - minimum, in float32, rounded once to the dtype of x. Bytes: the packed weight,
its values written, and read by the product: 0.5 + 2 + 2 per element of INT4.

Weights are dequantized in parts of the size of the scratch buffer, which all products of a device share: 128 MB in
16 bits, or the largest matrix if that is smaller.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm.quant.dequantize import dequantize as dequantize_any
from localllm.quant.formats import gguf
from localllm.quant.formats.gpu_packed import repack
from localllm.quant.packing import SCRATCH_ELEMENTS
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.kernels.gpu.chunks import CODE_TYPES, dequantize_plane, load_words, weight_arguments
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_unsupported,
    launch_kernel,
    meta_packed_weight,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.linear import flatten_rows
from localllm.runtime.kernels.registry import kernel

MIN_DEQUANTIZE_ROWS = 128  # estimated: from about here, a product takes longer than dequantizing
BLOCK_ROWS = 16  # per program: 2 KB, and 8 KB written, enough to saturate memory for any shape
WARPS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_scratch: dict[torch.device, Tensor] = {}
scratch_lock = threading.Lock()  # models of a process share a stream, and each launches from its own thread


def shared_scratch(device: torch.device, elements: int, dtype: torch.dtype) -> Tensor:
    """Return [elements] uninitialized, the same memory in each call, overwriting its previous content.

    It grows to the largest size requested, which happens while weights are prepared, so that steps need not
    allocate.
    """
    buffer, nbytes = _scratch.get(device), elements * dtype.itemsize
    if buffer is None or buffer.nbytes < nbytes:
        _scratch.pop(device, None)
        buffer = None  # freed before more is allocated
        buffer = _scratch[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return buffer[:nbytes].view(dtype)


def reserve_scratch(weight: QuantizedTensor, dtype: torch.dtype) -> None:
    """Make the scratch buffer large enough for the weight."""
    shared_scratch(weight.parts["q"].device, scratch_rows(weight) * weight.shape[1], dtype)


def scratch_rows(weight: QuantizedTensor) -> int:
    """Return how many rows of W fit in the scratch buffer, in parts of equal size."""
    count, columns = weight.shape
    return min(count, -(-count // -(-count * columns // SCRATCH_ELEMENTS) // BLOCK_ROWS) * BLOCK_ROWS)


@triton.jit
def dequantize_kernel(
    p_q,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    p_w,
    stored,
    chunks,
    first,
    N,
    K,
    KIND: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize N rows from `first` on to w [N, K]; each program handles a chunk of BN rows."""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    PLANES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    b_out = tl.program_id(0) * BN + tl.arange(0, BN)
    m_row = b_out < N
    b_row = first + b_out.to(tl.int64)
    chunk = tl.program_id(1)
    words = load_words(p_q, b_row, m_row, chunk, chunks, W)
    for plane in tl.static_range(PLANES):
        w = dequantize_plane(
            words, plane, chunk, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, b_row, m_row,
            KIND, W, GROUP, BLOCK, SHARE, True, p_w.dtype.element_ty,
        )  # fmt: skip
        column = (chunk * PLANES + plane) * W + tl.arange(0, W)
        p_out = p_w + b_out.to(tl.int64)[:, None] * K + column[None, :]
        tl.store(p_out, w, mask=m_row[:, None] & (column < K)[None, :])


def dequantize_rows(weight: QuantizedTensor, first: int, w: Tensor) -> None:
    """Dequantize rows from `first` on into w [rows, in], with columns in stored order."""
    arguments = weight_arguments(weight)
    grid = (triton.cdiv(w.shape[0], BLOCK_ROWS), arguments["chunks"])
    launch_kernel(
        dequantize_kernel,
        grid,
        WARPS,
        device=w.device,
        **arguments,
        p_w=w,
        first=first,
        N=w.shape[0],
        K=w.shape[1],
        BN=BLOCK_ROWS,
    )


def packed_unsupported(x: Tensor, weight: QuantizedTensor) -> str | None:
    """Return why the kernels for packed weights do not support these arguments, or None if they do."""
    if reason := gpu_unsupported(x):
        return reason
    if weight.format not in CODE_TYPES:
        return f"the weight is {weight.format}"
    return None if x.dtype in DTYPES else f"x is {x.dtype}"


def reorder_columns(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Return x [M, in], contiguous, with its columns in the weight's stored order."""
    order = weight.parts.get(COLUMN_ORDER)
    return (x if order is None else x.index_select(1, order)).contiguous()


def dequantized_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if reason := packed_unsupported(x, weight):
        return reason
    rows = x.shape[:-1].numel()
    return None if rows >= MIN_DEQUANTIZE_ROWS else f"{rows} rows: dequantizing inside the product is faster"


@kernel("linear", "triton-dequantized", dequantized_unsupported, first=True)
def linear_dequantized(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return flatten_rows(matmul_dequantized, x, weight, bias)


def matmul_dequantized(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Dequantize in parts and multiply. x: [M, in] -> [M, out]"""
    x, (count, columns), part_rows = reorder_columns(x, weight), weight.shape, scratch_rows(weight)
    with scratch_lock:
        w = shared_scratch(x.device, part_rows * columns, x.dtype).view(-1, columns)
        if part_rows >= count:
            dequantize_rows(weight, 0, w)
            return F.linear(x, w)
        y = x.new_empty(len(x), count)
        for begin in range(0, count, part_rows):
            part = w[: count - begin]
            dequantize_rows(weight, begin, part)
            torch.mm(x, part.T, out=y[:, begin : begin + len(part)])
        return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for form, group in (("int4", 128), ("int8", None), ("q4_k", 32), ("mxfp4", 32), ("fp8", 128)):
        name = f"{form}, group {group or 'of a row'}, 14336 x 4096"
        yield (
            name,
            lambda form=form, group=group: matmul_dequantized(
                meta_tensor(2048, 4096), meta_packed_weight(form, 14336, 4096, group)
            ),
        )


def packed_layout_unsupported(weight: QuantizedTensor) -> str | None:
    part = next(iter(weight.parts.values()))
    return None if part.device.type == "cuda" else gpu_unsupported(part)


@kernel("layout", "gpu-planes", packed_layout_unsupported, first=True)
def packed_layout(
    weights: list[QuantizedTensor], dtype: torch.dtype | None, between: Callable[[], None]
) -> Tensor | QuantizedTensor | None:
    """Repack weights in planes, and dense weights of a GGUF file in the dtype of x, some rows at a time on their
    device; also reserve the scratch buffer for products of many rows."""
    if dtype and all(weight.format in gguf.PLAIN_DTYPES for weight in weights):
        return torch.cat([dequantize_any(weight, dtype) for weight in weights])
    repacked = repack(*weights, on_read=between)
    if repacked and dtype:
        reserve_scratch(repacked, dtype)
    return repacked
