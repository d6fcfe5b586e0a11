"""A mixture of stacked experts, without the host knowing which experts were selected.

h[p] = gated(W_e x[p // k] + b_e) and y[p] = V_e h[p] + c_e for each pair p of a token and one of its k experts e;
then out[t] = sum over the token's pairs of weight[p] y[p], in ascending order of expert.

Few tokens: one program per pair and some rows of its expert; the first token that selected an expert computes it
for all others that did, whose programs exit, so that each selected expert is read once. Many tokens: pairs are
sorted by expert, and a program processes a block of one expert's pairs; it reads which one from counts on the
device, and the grid has the maximum number of blocks. Bytes: the selected experts' weights once per block of
tokens; h and y once each.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.kernels.experts import Experts, StackedExperts
from localllm.runtime.kernels.gpu.activations import apply_gate
from localllm.runtime.kernels.gpu.chunks import (
    CODE_TYPES,
    PLANES_PER_WORD,
    accumulate_chunk,
    accumulate_planes,
    apply_row_scale,
    first_offset,
    pipeline_stages,
    scale_applies_last,
    weight_arguments,
    word_pointers,
)
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_of,
    gpu_unsupported,
    launch_kernel,
    meta_packed_weight,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.quantized_gemm import WGMMA_ARCH
from localllm.runtime.kernels.gpu.small_m import MAX_ROWS, padded_rows
from localllm.runtime.kernels.registry import kernel

MAX_UNSORTED_TOKENS = MAX_ROWS

BLOCK_PAIRS = 64
SUM_WARPS = 4
MAX_WORDS = 64  # of a chunk
# With four trips of the loop in flight, the 3 programs per multiprocessor that gpt-oss has in its second product
# have 37 KB on their way, where an H200 needs 27. GPUs with little shared memory have less bandwidth, too.
FEW_TOKENS_STAGES = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUM_COLUMNS = 512  # that a program sums


class ExpertBlocks(NamedTuple):
    """Pairs of tokens and experts, sorted by expert.

    expert_starts: [experts + 1] int32, index of each expert's first pair in `order`; block_ends: [experts] int32,
    number of blocks up to and including the expert's; order: [T * k] int32.
    """

    expert_starts: Tensor
    block_ends: Tensor
    order: Tensor
    size: int  # maximum number of pairs in a block
    max_count: int  # maximum number of blocks


def sort_by_expert(chosen: Tensor, experts: int, size: int) -> ExpertBlocks:
    """Sort pairs by expert on the device of `chosen` [T, k], without reading values on the host."""
    pairs = chosen.numel()
    by_expert, order = chosen.flatten().sort(stable=True)
    edges = torch.arange(experts + 1, device=chosen.device)
    begin = torch.searchsorted(by_expert, edges)
    counts = begin[1:] - begin[:-1]
    end = ((counts + size - 1) // size).cumsum(0)
    used_experts = min(pairs, experts)  # each may have a block that is not full
    max_blocks = used_experts + (pairs - used_experts) // size
    return ExpertBlocks(begin.int(), end.int(), order.int(), size, max_blocks)


@triton.jit(do_not_specialize=["tokens"])
def grouped_matmul_kernel(
    p_q,
    p_scale,
    p_zero,
    p_minimum,
    p_block_scale,
    p_block_minimum,
    p_x,
    p_bias,
    p_y,
    p_chosen,
    p_begin,
    p_end,
    p_order,
    stored,
    chunks,
    rows_each,
    tokens,
    experts,
    N,
    K,
    SORTED: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_ALL: tl.constexpr,
    EXPERTS_ALL: tl.constexpr,
    FROM_PAIRS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    LAST: tl.constexpr,
    UNROLLED: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[p] = W_e x[p or p // CHOSEN] + bias_e; with ACTIVATION, W_e has 2 N rows, of which the first N gate y"""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    i_block = tl.program_id(0)
    if SORTED:
        b_expert = tl.arange(0, EXPERTS_ALL)
        ends = tl.load(p_end + b_expert, mask=b_expert < experts, other=2147483647)
        expert = tl.sum((ends <= i_block).to(tl.int32), 0)
        if expert >= experts:
            return
        before = tl.max(tl.where(b_expert < expert, ends, 0), 0)  # blocks of the experts before
        b_place = tl.load(p_begin + expert) + (i_block - before) * BM + tl.arange(0, BM)
        m_pair = b_place < tl.load(p_begin + expert + 1)
        b_pair = tl.load(p_order + b_place, mask=m_pair, other=0)
    else:
        expert = tl.load(p_chosen + i_block).to(tl.int32)
        b_token, b_pick = tl.arange(0, BM), tl.arange(0, CHOSEN_ALL)
        m_pick = (b_token < tokens)[:, None] & (b_pick < CHOSEN)[None, :]
        picks = tl.load(p_chosen + b_token[:, None] * CHOSEN + b_pick[None, :], mask=m_pick, other=-1)
        here = picks.to(tl.int32) == expert
        m_pair = tl.sum(here.to(tl.int32), 1) > 0
        if tl.min(tl.where(m_pair, b_token, BM), 0) != i_block // CHOSEN:
            return  # the first token that chose this expert computes it for all
        b_pair = b_token * CHOSEN + tl.sum(tl.where(here, b_pick[None, :], 0), 1)
    b_from = b_pair if FROM_PAIRS else b_pair // CHOSEN
    b_p_x = p_x + b_from.to(tl.int64) * K
    b_out = tl.program_id(1) * BN + tl.arange(0, BN)
    m_row = b_out < N
    b_row = expert.to(tl.int64) * rows_each + b_out
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    if SORTED or KIND == "plain":
        for chunk in range(0, chunks):
            acc = accumulate_chunk(
                acc, p_q, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, chunks, b_row, m_row,
                chunk, b_p_x, m_pair, K, KIND, W, GROUP, BLOCK, SHARE, LAST,
            )  # fmt: skip
            if ACTIVATION is not None:
                up = accumulate_chunk(
                    up, p_q, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, chunks, b_row + N,
                    m_row, chunk, b_p_x, m_pair, K, KIND, W, GROUP, BLOCK, SHARE, LAST,
                )  # fmt: skip
    else:
        b_near = expert.to(tl.int64) * rows_each + tl.minimum(b_out, N - 1)  # rows that exist
        b_words = word_pointers(p_q, b_near, chunks, W)
        b_columns = b_p_x[None, :] + tl.arange(0, W)[:, None]
        added = first_offset(p_zero, p_minimum, b_near, KIND, GROUP, p_x.dtype.element_ty)
        added_up = added
        if ACTIVATION is not None:
            b_words_up = word_pointers(p_q, b_near + N, chunks, W)
            added_up = first_offset(p_zero, p_minimum, b_near + N, KIND, GROUP, p_x.dtype.element_ty)
        for first in range(0, chunks, UNROLLED):
            for i in tl.static_range(UNROLLED):
                acc = accumulate_planes(
                    acc, b_words, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored, b_near,
                    added, first + i, b_columns, m_pair[None, :], K, KIND, W, GROUP, BLOCK, SHARE, WHOLE_CHUNKS,
                )  # fmt: skip
                if ACTIVATION is not None:
                    up = accumulate_planes(
                        up, b_words_up, p_scale, p_zero, p_minimum, p_block_scale, p_block_minimum, stored,
                        b_near + N, added_up, first + i, b_columns, m_pair[None, :], K, KIND, W, GROUP, BLOCK,
                        SHARE, WHOLE_CHUNKS,
                    )  # fmt: skip
    acc = apply_row_scale(acc, p_scale, b_row, m_row, LAST)
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    b_bias = expert * (HALVES * N) + b_out
    if p_bias is not None:
        acc += tl.load(p_bias + b_bias, mask=m_row, other=0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        up = apply_row_scale(up, p_scale, b_row + N, m_row, LAST)
        if p_bias is not None:
            up += tl.load(p_bias + b_bias + N, mask=m_row, other=0).to(tl.float32)[:, None]
        acc = apply_gate(acc, up, ACTIVATION)
    b_p_y = p_y + b_pair.to(tl.int64)[:, None] * N + b_out[None, :]
    tl.store(b_p_y, tl.trans(acc).to(p_y.dtype.element_ty), mask=m_pair[:, None] & m_row[None, :])


@triton.jit
def weighted_sum_kernel(
    p_y,
    p_chosen,
    p_weight,
    p_out,
    N,
    CHOSEN: tl.constexpr,
    CHOSEN_ALL: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = sum of weight[t, j] y[t * CHOSEN + j], in order of expert"""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    b_column = tl.program_id(1) * BN + tl.arange(0, BN)
    m_column = b_column < N
    b_pick = tl.arange(0, CHOSEN_ALL)
    m_pick = b_pick < CHOSEN
    picks = tl.load(p_chosen + token * CHOSEN + b_pick, mask=m_pick, other=2147483647).to(tl.int32)
    share = tl.load(p_weight + token * CHOSEN + b_pick, mask=m_pick, other=0)
    place = tl.sum((picks[None, :] < picks[:, None]).to(tl.int32), 1)  # how many expert ids are smaller
    total = tl.zeros((BN,), tl.float32)
    for i in range(CHOSEN):
        pick = tl.sum(tl.where((place == i) & m_pick, b_pick, 0), 0)
        mine = tl.sum(tl.where((place == i) & m_pick, share, 0.0), 0)
        y = tl.load(p_y + (token * CHOSEN + pick) * N + b_column, mask=m_column, other=0)
        total += y.to(tl.float32) * mine
    tl.store(p_out + token * N + b_column, total.to(p_out.dtype.element_ty), mask=m_column)


def grouped_unsupported(x: Tensor, chosen: Tensor, weight: Tensor, mlps: Experts) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    if not isinstance(mlps, StackedExperts):
        return "the experts are not stacked"
    for matrix in (mlps.gate_up, mlps.down):
        if isinstance(matrix, QuantizedTensor) and (
            matrix.format not in CODE_TYPES or COLUMN_ORDER in matrix.parts
        ):
            return f"an expert's weight is {matrix.format}"
    return None if x.dtype in DTYPES else f"x is {x.dtype}"


@kernel("experts", "triton-grouped", grouped_unsupported, first=True)
def experts_grouped(x: Tensor, chosen: Tensor, weight: Tensor, mlps: StackedExperts) -> Tensor:
    x, chosen, weight = x.contiguous(), chosen.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    # If x is not read from shared memory, larger blocks take too many registers.
    size = BLOCK_PAIRS if gpu_of(x.device).arch == WGMMA_ARCH else BLOCK_PAIRS // 2
    sent = None if len(x) <= MAX_UNSORTED_TOKENS else sort_by_expert(chosen, mlps.count, size)
    pairs, n = chosen.numel(), mlps.down.shape[1]
    h = x.new_empty(pairs, n)
    grouped_matmul(x, chosen, sent, mlps.gate_up, mlps.gate_up_bias, mlps, h, mlps.activation)
    y = x.new_empty(pairs, x.shape[1])
    grouped_matmul(h, chosen, sent, mlps.down, mlps.down_bias, mlps, y, None)
    launch_kernel(
        weighted_sum_kernel,
        (len(x), triton.cdiv(x.shape[1], SUM_COLUMNS)),
        SUM_WARPS,
        device=x.device,
        p_y=y,
        p_chosen=chosen,
        p_weight=weight,
        p_out=out,
        N=x.shape[1],
        CHOSEN=chosen.shape[1],
        CHOSEN_ALL=triton.next_power_of_2(chosen.shape[1]),
        BN=SUM_COLUMNS,
    )
    return out


def choose_tile(arch: int, kind: str, few: bool, gated: bool) -> tuple[int, int]:
    """Return the rows of an expert that a program multiplies (per half if gated), and warps. Estimated, not
    measured.

    Few tokens: programs of one warp, as each warp would decode the same 16 rows again, and of 32 rows in all, so
    that 4 selected experts of 3,000 rows each occupy several per multiprocessor. On sm_90 a weight takes 2.1
    instructions in INT4 and 4.2 in MXFP4. Dense rows take many registers, so that fewer fit, or on sm_100 more
    warps share them.
    Many: each dequantized weight is multiplied with 64 pairs; if x is not read from shared memory, the sums of
    both halves and x take so many registers that the halves are smaller, and use more threads.
    """
    if few and kind == "plain":
        return (64, 4) if gated and arch == 100 else (16, 1)
    if few:
        return (16 if gated else 32), 1
    if arch == WGMMA_ARCH or not gated:
        return 64, 4
    return 32, 8


def grouped_matmul(
    x: Tensor,
    chosen: Tensor,
    sent: ExpertBlocks | None,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None,
    mlps: StackedExperts,
    y: Tensor,
    activation: Activation | None,
) -> None:
    """Compute y [pairs, N] of x [T or pairs, K]. sent: the pairs of each expert, None for few tokens."""
    arguments, gpu = weight_arguments(weight), gpu_of(x.device)
    pairs, chunks = sent.size if sent else padded_rows(len(chosen), gpu), arguments["chunks"]
    rows, warps = choose_tile(gpu.arch, arguments["KIND"], sent is None, activation is not None)
    # Short chunks share the barriers of a trip of the loop, in which as many are unrolled as are one of 64 words.
    # On AMD, whose code takes more registers, a trip has one.
    most = 1 if gpu.amd_arch else MAX_WORDS // arguments["W"]
    unrolled = max(i for i in range(1, most + 1) if chunks % i == 0)
    stages = pipeline_stages(arguments, (1 if activation is None else 2) * rows, pairs, x, 1 if sent else unrolled)
    if not (sent or gpu.small_shared or arguments["KIND"] == "plain"):
        stages = FEW_TOKENS_STAGES
    launch_kernel(
        grouped_matmul_kernel,
        (chosen.numel() if sent is None else sent.max_count, triton.cdiv(y.shape[1], rows)),
        warps,
        stages,
        device=x.device,
        **arguments,
        LAST=scale_applies_last(weight),
        p_x=x,
        p_bias=bias,
        p_y=y,
        p_chosen=chosen,
        p_begin=sent.expert_starts if sent else None,
        p_end=sent.block_ends if sent else None,
        p_order=sent.order if sent else None,
        rows_each=weight.shape[0] // mlps.count,
        tokens=len(chosen),
        experts=mlps.count,
        N=y.shape[1],
        K=x.shape[1],
        SORTED=sent is not None,
        CHOSEN=chosen.shape[1],
        CHOSEN_ALL=triton.next_power_of_2(chosen.shape[1]),
        EXPERTS_ALL=triton.next_power_of_2(mlps.count),
        FROM_PAIRS=activation is None,
        ACTIVATION=activation,
        UNROLLED=unrolled,
        WHOLE_CHUNKS=x.shape[1] == chunks * arguments["W"] * PLANES_PER_WORD[arguments["KIND"]],
        BN=rows,
        BM=pairs,
    )


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield gpt-oss-20b, and Qwen3-30B-A3B in INT4 and bfloat16."""
    models = (("mxfp4", 32, 2880, 2880, 32, 4), ("int4", 128, 2048, 768, 128, 8), (None, None, 2048, 768, 128, 8))
    for (form, group, hidden, n, count, k), sizes in zip(
        models, ((1, 2048), (MAX_UNSORTED_TOKENS, 2048), (2048,)), strict=True
    ):
        gate_up, down = (
            meta_packed_weight(form, count * rows, columns, group) if form else meta_tensor(count * rows, columns)
            for rows, columns in ((2 * n, hidden), (hidden, n))
        )
        mlps = StackedExperts(
            gate_up, down, meta_tensor(count * 2 * n), meta_tensor(count * hidden), "swiglu_clamped", count
        )
        for tokens in sizes:
            call = (
                meta_tensor(tokens, hidden),
                meta_tensor(tokens, k, dtype=torch.int64),
                meta_tensor(tokens, k, dtype=torch.float32),
            )
            name = f"{form or 'bf16'}, {k} of {count} experts, {tokens} tokens"
            yield name, lambda call=call, mlps=mlps: experts_grouped(*call, mlps)
