"""The short convolution along the tokens (kernels/causal_conv.py), for all sequences of a step at once.

A program processes some tokens of one sequence and some channels. The first tokens of a sequence need its saved
state, so the program that processes them also writes the new states, after all its threads have read.

Bytes: x and y once each, the state once each way; x is read `kernel` times, all but once from a cache.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import DeltaNetConfig
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.delta_net import sequence_pieces
from localllm.runtime.kernels.gpu.launch import allow_next_kernel, gpu_unsupported, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.gpu.norms import FLOAT_DTYPES
from localllm.runtime.kernels.gpu.rounding import round_to_dtype
from localllm.runtime.kernels.registry import kernel
from localllm.runtime.kv_cache.tensors import RecurrentCache

BLOCK_TOKENS = 16  # of a program; all that need the saved state must be among the first
BLOCK_CHANNELS = 256  # of a program: 32 programs per token of 8,192 channels


@triton.jit
def load_inputs(p_x, p_kept, at, i, m, stride, CHANNELS: tl.constexpr, KEPT: tl.constexpr):
    """Load inputs of a sequence at positions `at` [n, 1] from its first token; negative ones from its state."""
    x = tl.load(p_x + at * stride + i, mask=m & (at >= 0), other=0.0).to(tl.float32)
    if KEPT > 0:
        before = tl.load(p_kept + (at + KEPT) * CHANNELS + i, mask=m & (at < 0), other=0.0).to(tl.float32)
        x = tl.where(at < 0, before, x)
    return x


@triton.jit
def causal_conv_kernel(
    p_x,
    p_taps,
    p_y,
    p_kept,
    p_start,
    p_rows,
    p_first,
    p_end,
    p_row,
    stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    SAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    KEPT: tl.constexpr = KERNEL - 1
    sequence = tl.program_id(0)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    begin = tl.load(p_start + sequence)
    count = tl.load(p_start + sequence + 1) - begin
    if tl.program_id(1) * TOKENS < count:
        at = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
        m = (at < count) & (i < CHANNELS)
        p_x += tl.cast(begin, tl.int64) * stride
        p_own = p_kept + tl.load(p_rows + sequence).to(tl.int64) * (KEPT * CHANNELS)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in range(KERNEL):
            weight = tl.load(p_taps + tap * CHANNELS + i, mask=i < CHANNELS, other=0.0)
            total += load_inputs(p_x, p_own, at - (KEPT - tap), i, m, stride, CHANNELS, KEPT) * weight
        if SILU:
            total *= tl.sigmoid(total)
        p_y += tl.cast(begin, tl.int64) * CHANNELS
        tl.store(p_y + at * CHANNELS + i, round_to_dtype(total, p_y.dtype.element_ty), mask=m)
        if KEPT > 0 and tl.program_id(1) == 0:
            kept = tl.arange(0, KEPT_BLOCK)[:, None].to(tl.int64)
            m_kept = (kept < KEPT) & (i < CHANNELS)
            first, last = sequence_pieces(p_first, sequence, SAVED)
            piece = first
            while piece < last:  # the last piece writes to the sequence's own state slot
                end = tl.load(p_end + piece + 1) - begin
                state = load_inputs(p_x, p_own, end - KEPT + kept, i, m_kept, stride, CHANNELS, KEPT)
                p_to = p_kept + tl.load(p_row + piece).to(tl.int64) * (KEPT * CHANNELS)
                tl.debug_barrier()  # all threads have read
                tl.store(p_to + kept * CHANNELS + i, state.to(p_kept.dtype.element_ty), mask=m_kept)
                piece += 1


def causal_conv_unsupported(
    x: Tensor, taps: Tensor, cache: RecurrentCache, batch: Batch, silu: bool
) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    if batch.state_slots is None:
        return "the state slots are not on the device"
    if x.dtype not in FLOAT_DTYPES or cache.conv.dtype not in FLOAT_DTYPES or taps.dtype != torch.float32:
        return "x or the state is in float64, or taps are not in float32"
    return None if len(taps) <= BLOCK_TOKENS + 1 else f"the convolution covers more than {BLOCK_TOKENS + 1} tokens"


@kernel("causal_conv", "triton-tokens", causal_conv_unsupported, first=True)
def causal_conv(x: Tensor, taps: Tensor, cache: RecurrentCache, batch: Batch, silu: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    pieces, channels = batch.state_segments, x.shape[1]
    tokens = min(BLOCK_TOKENS, triton.next_power_of_2(batch.max_query_len))
    launch_kernel(
        causal_conv_kernel,
        (
            len(batch.query_start) - 1,
            triton.cdiv(batch.max_query_len, tokens),
            triton.cdiv(channels, BLOCK_CHANNELS),
        ),
        4,
        device=x.device,
        p_x=x,
        p_taps=taps,
        p_y=y,
        p_kept=cache.conv,
        p_start=batch.query_start,
        p_rows=batch.state_slots,
        p_first=pieces.first if pieces else None,
        p_end=pieces.end if pieces else batch.query_start,
        p_row=pieces.state_slot if pieces else batch.state_slots,
        stride=x.stride(0),
        CHANNELS=channels,
        KERNEL=len(taps),
        SILU=silu,
        SAVED=pieces is not None,
        TOKENS=tokens,
        KEPT_BLOCK=triton.next_power_of_2(max(1, len(taps) - 1)),
        BLOCK=BLOCK_CHANNELS,
    )
    return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    def call(sequences: int, tokens: int) -> object:
        c, meta = DeltaNetConfig(16, 32, 128, 128, 4), torch.device("meta")
        x = torch.empty(sequences * tokens, c.channels, dtype=torch.bfloat16, device=meta)
        taps = torch.empty(c.kernel_size, c.channels, device=meta)
        start = torch.empty(sequences + 1, dtype=torch.int32, device=meta)
        rows, places = start[:-1], torch.empty(sequences * tokens, dtype=torch.int64, device=meta)
        batch = Batch(places, places, start, rows, rows, places, places, 16, tokens, tokens, rows)
        return causal_conv(x, taps, RecurrentCache(4, c, torch.bfloat16, meta), batch, True)

    yield "4 taps, 8192 channels, one token", lambda: call(2, 1)
    yield "4 taps, 8192 channels, 2048 tokens", lambda: call(2, 2048)
