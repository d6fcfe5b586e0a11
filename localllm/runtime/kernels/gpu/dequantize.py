"""Packed weights to plain ones, and a plain product of them: for so many rows of x that multiplying takes longer
than reading, cuBLAS on tensor cores wins what unpacking costs.

w[o, i] = (code - zero) * scale - minimum, in float32, rounded once to the dtype of x. Bytes: the packed weight,
its numbers written, and read by the product: 0.5 + 2 + 2 an element of INT4.

Unpacked is so much at a time as `scratch` holds, one buffer a device that all products of its stream use one after
another: 128 MB in 16 bits, or the largest matrix where that is smaller; `scratch_elements` tells plans how many.
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

from localllm.quant.packing import SCRATCH_ELEMENTS
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.kernels.gpu.chunks import CODE_TYPES, dequantize_plane, load_words, weight_arguments
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, gpu_unsupported, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.meta import meta_packed_weight, meta_tensor
from localllm.runtime.kernels.linear import flatten_rows
from localllm.runtime.kernels.registry import kernel

MIN_DEQUANTIZE_ROWS = 128  # arithmetic: from about here a product takes longer than unpacking does
BLOCK_ROWS = 16  # that a program unpacks: 2 KB, and 8 KB written, so that memory is busy whatever the shape
WARPS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_scratch: dict[torch.device, Tensor] = {}
_turn = threading.Lock()  # models of one process share a stream, and each launches from a thread of its own


def shared_scratch(device: torch.device, elements: int, dtype: torch.dtype) -> Tensor:
    """[elements] uninitialized, the same memory in each call; what was in it before is lost. It grows to the most
    that was asked for: while weights are prepared, so that a step finds it as large as it needs it."""
    held, wanted = _scratch.get(device), elements * dtype.itemsize
    if held is None or held.nbytes < wanted:
        _scratch.pop(device, None)
        held = None  # given back before more is asked for
        held = _scratch[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
    return held[:wanted].view(dtype)


def reserve_scratch(weight: QuantizedTensor, dtype: torch.dtype) -> None:
    """Lets the scratch be as large as the weight will need it."""
    shared_scratch(weight.parts["q"].device, scratch_rows(weight) * weight.shape[1], dtype)


def scratch_rows(weight: QuantizedTensor) -> int:
    """Of W: as many as the scratch holds, in parts of one size."""
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
    """Rows first, first + 1, ..., N of them -> w [N, K], a chunk of BN rows a program."""
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
            KIND, W, GROUP, BLOCK, SHARE, True,
        )  # fmt: skip
        column = (chunk * PLANES + plane) * W + tl.arange(0, W)
        p_out = p_w + b_out.to(tl.int64)[:, None] * K + column[None, :]
        tl.store(p_out, w.to(p_w.dtype.element_ty), mask=m_row[:, None] & (column < K)[None, :])


def dequantize_rows(weight: QuantizedTensor, first: int, w: Tensor) -> None:
    """w [rows, in] becomes the weight's rows from `first` on, its columns in the order that they are stored in."""
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
    """Why the kernels that read planes cannot take these; None where they can."""
    if reason := gpu_unsupported(x):
        return reason
    if weight.format not in CODE_TYPES:
        return f"the weight is {weight.format}"
    return None if x.dtype in DTYPES else f"x is {x.dtype}"


def reorder_columns(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x [M, in], its columns as the weight's are stored, one row after the other."""
    order = weight.parts.get(COLUMN_ORDER)
    return (x if order is None else x.index_select(1, order)).contiguous()


def dequantized_unsupported(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if reason := packed_unsupported(x, weight):
        return reason
    rows = x.shape[:-1].numel()
    return None if rows >= MIN_DEQUANTIZE_ROWS else f"{rows} rows are for a product that unpacks on the way"


@kernel("linear", "triton-dequantized", dequantized_unsupported, first=True)
def linear_dequantized(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return flatten_rows(matmul_dequantized, x, weight, bias)


def matmul_dequantized(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]"""
    x, (count, columns), some = reorder_columns(x, weight), weight.shape, scratch_rows(weight)
    with _turn:
        w = shared_scratch(x.device, some * columns, x.dtype).view(-1, columns)
        if some >= count:
            dequantize_rows(weight, 0, w)
            return F.linear(x, w)
        y = x.new_empty(len(x), count)
        for begin in range(0, count, some):
            rows = w[: count - begin]
            dequantize_rows(weight, begin, rows)
            torch.mm(x, rows.T, out=y[:, begin : begin + len(rows)])
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
