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
from localllm.quant.tensor import ORDER, QuantizedTensor
from localllm.runtime.kernels.gpu.chunks import KINDS, plane_of, weight_arguments, words_of
from localllm.runtime.kernels.gpu.launch import let_next_start, needs_gpu, start, wait_for_inputs
from localllm.runtime.kernels.gpu.meta import planes, x_of
from localllm.runtime.kernels.linear import of_rows
from localllm.runtime.kernels.registry import kernel

MANY_ROWS = 128  # arithmetic: from about here a product takes longer than unpacking does
ROWS = 16  # that a program unpacks: 2 KB, and 8 KB written, so that memory is busy whatever the shape
WARPS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_scratch: dict[torch.device, Tensor] = {}
_turn = threading.Lock()  # models of one process share a stream, and each launches from a thread of its own


def scratch(device: torch.device, elements: int, dtype: torch.dtype) -> Tensor:
    """[elements] uninitialized, the same memory in each call; what was in it before is lost. It grows to the most
    that was asked for: while weights are prepared, so that a step finds it as large as it needs it."""
    held, wanted = _scratch.get(device), elements * dtype.itemsize
    if held is None or held.nbytes < wanted:
        _scratch.pop(device, None)
        held = None  # given back before more is asked for
        held = _scratch[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
    return held[:wanted].view(dtype)


def reserve(weight: QuantizedTensor, dtype: torch.dtype) -> None:
    """Lets the scratch be as large as the weight will need it."""
    scratch(weight.parts["q"].device, rows_at_once(weight) * weight.shape[1], dtype)


def rows_at_once(weight: QuantizedTensor) -> int:
    """Of W: as many as the scratch holds, in parts of one size."""
    count, columns = weight.shape
    return min(count, -(-count // -(-count * columns // SCRATCH_ELEMENTS) // ROWS) * ROWS)


@triton.jit
def unpack(
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
    let_next_start(PDL)
    PLANES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    b_out = tl.program_id(0) * BN + tl.arange(0, BN)
    m_row = b_out < N
    b_row = first + b_out.to(tl.int64)
    chunk = tl.program_id(1)
    words = words_of(p_q, b_row, m_row, chunk, chunks, W)
    for plane in tl.static_range(PLANES):
        w = plane_of(
            words, plane, chunk, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, b_row, m_row,
            KIND, W, GROUP, BLOCK, SHARE, True,
        )  # fmt: skip
        column = (chunk * PLANES + plane) * W + tl.arange(0, W)
        p_out = p_w + b_out.to(tl.int64)[:, None] * K + column[None, :]
        tl.store(p_out, w.to(p_w.dtype.element_ty), mask=m_row[:, None] & (column < K)[None, :])


def unpack_rows(weight: QuantizedTensor, first: int, w: Tensor) -> None:
    """w [rows, in] becomes the weight's rows from `first` on, its columns in the order that they are stored in."""
    arguments = weight_arguments(weight)
    grid = (triton.cdiv(w.shape[0], ROWS), arguments["chunks"])
    start(
        unpack,
        grid,
        WARPS,
        device=w.device,
        **arguments,
        p_w=w,
        first=first,
        N=w.shape[0],
        K=w.shape[1],
        BN=ROWS,
    )


def in_planes(x: Tensor, weight: QuantizedTensor) -> str | None:
    """Why the kernels that read planes cannot take these; None where they can."""
    if reason := needs_gpu(x):
        return reason
    if weight.format not in KINDS:
        return f"the weight is {weight.format}"
    return None if x.dtype in DTYPES else f"x is {x.dtype}"


def ordered(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x [M, in], its columns as the weight's are stored, one row after the other."""
    order = weight.parts.get(ORDER)
    return (x if order is None else x.index_select(1, order)).contiguous()


def many_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> str | None:
    if reason := in_planes(x, weight):
        return reason
    rows = x.shape[:-1].numel()
    return None if rows >= MANY_ROWS else f"{rows} rows are for a product that unpacks on the way"


@kernel("linear", "triton-dequantized", many_rows, first=True)
def linear_dequantized(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return of_rows(dequantized_product, x, weight, bias)


def dequantized_product(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x: [M, in] -> [M, out]"""
    x, (count, columns), some = ordered(x, weight), weight.shape, rows_at_once(weight)
    with _turn:
        w = scratch(x.device, some * columns, x.dtype).view(-1, columns)
        if some >= count:
            unpack_rows(weight, 0, w)
            return F.linear(x, w)
        y = x.new_empty(len(x), count)
        for begin in range(0, count, some):
            rows = w[: count - begin]
            unpack_rows(weight, begin, rows)
            torch.mm(x, rows.T, out=y[:, begin : begin + len(rows)])
        return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    for form, group in (("int4", 128), ("int8", None), ("q4_k", 32), ("mxfp4", 32), ("fp8", 128)):
        name = f"{form}, group {group or 'of a row'}, 14336 x 4096"
        yield (
            name,
            lambda form=form, group=group: dequantized_product(x_of(2048, 4096), planes(form, 14336, 4096, group)),
        )
