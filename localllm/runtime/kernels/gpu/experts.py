"""A mixture of experts whose weights lie stacked, without the host knowing which were chosen.

h[p] = gated(W_e x[p // k] + b_e) and y[p] = V_e h[p] + c_e for each pair p of a token and the expert e that it
chose, k a token; then out[t] = sum over the token's pairs of weight[p] y[p], in ascending order of expert.

Few tokens: a program for each pair and some rows of its expert; the first token that chose an expert computes for
all that did, and the programs of the others leave, so each chosen expert is read once. Many tokens: pairs are
sorted by expert, and a program takes a block of one expert's pairs; which, it reads from what the device counted,
as there are at most so many blocks. Bytes: the chosen experts' weights once a block of tokens; h and y once each.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import let_next_start, wait_for_inputs
from localllm.runtime.kernels.gpu.tiles import gated, tile_product

FEW = 16  # tokens: the columns of a tensor core's smallest product


class Tiles(NamedTuple):
    """Arithmetic, not measured."""

    rows: int  # of an expert's weights that a program multiplies; of each half where they are gated
    pairs: int
    columns: int  # at once
    warps: int
    stages: int


# Few tokens: small programs, so that even 4 chosen experts are several a multiprocessor. Many: accumulators of
# 64 x 128 float32 are 64 registers of 128 threads, and each weight that was unpacked meets 64 or 128 tokens.
DECODE = Tiles(32, FEW, 128, 4, 3)
PREFILL = Tiles(64, 64, 64, 4, 3)


class Blocks(NamedTuple):
    """Pairs by expert: `begin` [experts + 1] int32, where each expert's begin in `order`; `end` [experts] int32,
    how many blocks of pairs there are up to and with an expert's; `order` [T * k] int32."""

    begin: Tensor
    end: Tensor
    order: Tensor
    most: int  # blocks there can be


def blocks_of(chosen: Tensor, experts: int, size: int) -> Blocks:
    """On the device of `chosen` [T, k], without its contents being known to the host."""
    pairs = chosen.numel()
    by_expert, order = chosen.flatten().sort(stable=True)
    edges = torch.arange(experts + 1, device=chosen.device)
    begin = torch.searchsorted(by_expert, edges)
    counts = begin[1:] - begin[:-1]
    end = ((counts + size - 1) // size).cumsum(0)
    busy = min(pairs, experts)  # of which each may have a block that is not full
    most = busy + (pairs - busy) // size
    return Blocks(begin.int(), end.int(), order.int(), most)


@triton.jit
def products_of_experts(
    p_x,
    p_w,
    p_bias,
    p_y,
    p_chosen,
    p_begin,
    p_end,
    p_order,
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
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[p] = W_e x[p or p // CHOSEN] + bias_e; with ACTIVATION W_e has 2 N rows, and y is gated by the first N."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
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
    b_from = (b_pair if FROM_PAIRS else b_pair // CHOSEN).to(tl.int64)
    b_row = tl.program_id(1) * BN + tl.arange(0, BN)
    m_row = b_row < N
    HALVES: tl.constexpr = 2 if ACTIVATION else 1
    first = expert.to(tl.int64) * (HALVES * N)
    acc = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        acc = tile_product(acc, p_w, first + b_row, m_row, p_x, b_from, m_pair, k, K, BK)
        if ACTIVATION:
            other = tile_product(other, p_w, first + N + b_row, m_row, p_x, b_from, m_pair, k, K, BK)
    if p_bias is not None:
        acc += tl.load(p_bias + first + b_row, mask=m_row, other=0).to(tl.float32)[:, None]
        if ACTIVATION:
            other += tl.load(p_bias + first + N + b_row, mask=m_row, other=0).to(tl.float32)[:, None]
    if ACTIVATION:
        acc = gated(acc, other, ACTIVATION)
    p_out = p_y + b_pair.to(tl.int64)[:, None] * N + b_row[None, :]
    tl.store(p_out, tl.trans(acc).to(p_y.dtype.element_ty), mask=m_pair[:, None] & m_row[None, :])


@triton.jit
def weighted_sum(
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
    """out[t] = sum of weight[t, j] y[t * CHOSEN + j], by expert."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    b_column = tl.program_id(1) * BN + tl.arange(0, BN)
    m_column = b_column < N
    b_pick = tl.arange(0, CHOSEN_ALL)
    m_pick = b_pick < CHOSEN
    picks = tl.load(p_chosen + token * CHOSEN + b_pick, mask=m_pick, other=2147483647).to(tl.int32)
    share = tl.load(p_weight + token * CHOSEN + b_pick, mask=m_pick, other=0)
    place = tl.sum((picks[None, :] < picks[:, None]).to(tl.int32), 1)  # how many smaller ones there are
    total = tl.zeros((BN,), tl.float32)
    for i in range(CHOSEN):
        pick = tl.sum(tl.where((place == i) & m_pick, b_pick, 0), 0)
        mine = tl.sum(tl.where((place == i) & m_pick, share, 0.0), 0)
        y = tl.load(p_y + (token * CHOSEN + pick) * N + b_column, mask=m_column, other=0)
        total += y.to(tl.float32) * mine
    tl.store(p_out + token * N + b_column, total.to(p_out.dtype.element_ty), mask=m_column)
