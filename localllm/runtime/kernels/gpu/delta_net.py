"""The gated delta rule (kernels/delta_net.py) for all sequences of a step at once, in float32.

A program processes one value head of one sequence and COLUMNS columns of its state S [key_dim, value_dim], which
are independent. If a sequence has few new tokens, `delta_net_step_kernel` processes them one after another with S
in registers, so that a token's result does not depend on the other tokens; otherwise `delta_net_chunk_kernel`
processes chunks of them as matrix products, with S in global memory, in parts. Only the sequence's own tokens
decide which kernel is used.

Within a chunk of C tokens, with D[i, j] the product of exp(decay) of the tokens behind j up to i, and d[i] that
from the chunk's begin (Yang et al. 2024, section 3.2, with decay):

A = strictly lower part of beta_i (k_i k_j) D[i, j];  delta = (1 + A)^-1 beta (v - d (k S))
out = d (q S) + lower part of ((q_i k_j) D[i, j]) delta;  S <- D[C, begin] S + (D[C, j] k_j)^T delta

(1 + A)^-1 is computed by forward substitution in diagonal blocks of 16, then block by block. Decays are summed
separately, because differences of prefix sums would lose relevant digits. Products are in float32: three TF32
products, which are as exact, do not fit in registers.

Bytes of a decode step: S once each way, 8 * value_heads * key_dim * value_dim per sequence.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import DeltaNetConfig
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    dot,
    gpu_unsupported,
    launch_kernel,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.norms import FLOAT_DTYPES
from localllm.runtime.kernels.gpu.rounding import round_to_dtype
from localllm.runtime.kernels.registry import kernel
from localllm.runtime.kv_cache.tensors import RecurrentCache

MAX_STEP_TOKENS = 16  # tokens of a sequence that are processed one after another
CHUNK_TOKENS = 32  # twice as many do not fit in registers
KEY_PART = 32  # of a key dimension: the part that a product has in registers
BLOCK_COLUMNS = 32  # 128 bytes of each row of S; 128 programs per sequence with 32 heads of 128
MAX_KEY_DIM = 256  # S must fit in registers


@triton.jit
def sequence_pieces(p_first, sequence, SAVED: tl.constexpr):
    """Return the first of a sequence's pieces and the one behind its last."""
    if SAVED:
        return tl.load(p_first + sequence), tl.load(p_first + sequence + 1)
    else:
        return sequence, sequence + 1


@triton.jit
def delta_net_step_kernel(
    p_q,
    p_k,
    p_v,
    p_decay,
    p_beta,
    p_out,
    p_state,
    p_start,  # [B + 1], where sequences begin
    p_rows,  # [B]
    p_first,
    p_end,
    p_row,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    scale,
    VALUE_HEADS: tl.constexpr,
    SHARES: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    FEW: tl.constexpr,
    SAVED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence, head = tl.program_id(0) // VALUE_HEADS, tl.program_id(0) % VALUE_HEADS
    i_k = tl.arange(0, BLOCK_K)[:, None]
    i_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    m = (i_k < K_DIM) & (i_v < V_DIM)
    i_state = (head * K_DIM + i_k) * V_DIM + i_v
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    begin = tl.load(p_start + sequence)
    count = tl.load(p_start + sequence + 1) - begin
    if (count > 0) & (count <= FEW):
        row = tl.load(p_rows + sequence).to(tl.int64)
        state = tl.load(p_state + row * (VALUE_HEADS * K_DIM * V_DIM) + i_state, mask=m, other=0.0)
        first, last = sequence_pieces(p_first, sequence, SAVED)
        piece = first
        while piece < last:
            end = tl.load(p_end + piece + 1)
            t = begin
            while t < end:
                token = tl.cast(t, tl.int64)
                i_q = head // SHARES * K_DIM + i_k
                q = tl.load(p_q + token * q_stride + i_q, mask=i_k < K_DIM, other=0.0).to(tl.float32) * scale
                k = tl.load(p_k + token * k_stride + i_q, mask=i_k < K_DIM, other=0.0).to(tl.float32)
                v = tl.load(p_v + token * v_stride + head * V_DIM + i_v, mask=i_v < V_DIM, other=0.0).to(
                    tl.float32
                )
                fade = tl.exp(tl.load(p_decay + token * decay_stride + head))
                beta = tl.load(p_beta + token * beta_stride + head)
                delta = (v - fade * tl.sum(state * k, 0, keep_dims=True)) * beta
                out = fade * tl.sum(state * q, 0, keep_dims=True) + tl.sum(q * k) * delta
                state = state * fade + k * delta
                p_here = p_out + (token * VALUE_HEADS + head) * V_DIM + i_v
                tl.store(p_here, round_to_dtype(out, p_out.dtype.element_ty), mask=i_v < V_DIM)
                t += 1
            row = tl.load(p_row + piece).to(tl.int64)
            tl.store(p_state + row * (VALUE_HEADS * K_DIM * V_DIM) + i_state, state, mask=m)
            begin = end
            piece += 1


@triton.jit
def solve_lower(a, x, i, j, CHUNK: tl.constexpr):
    """Return (1 + a)^-1 x for a strictly lower triangular a [CHUNK, CHUNK].

    i: row [CHUNK, 1], j: column [1, CHUNK]
    """
    tl.static_assert(CHUNK == 32)
    near = i // 16 == j // 16
    diagonal = tl.where(near, a, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0)
    for c in range(15):
        column = tl.sum(tl.where(j % 16 == c, diagonal, 0.0), 1, keep_dims=True)
        row = tl.sum(tl.where((i % 16 == c) & near, inverse, 0.0), 0, keep_dims=True)
        inverse -= tl.where(near, column * row, 0.0)
    # 1 + a = (diagonal blocks) (1 + b), and b^2 = 0
    b = dot(inverse, tl.where(near, 0.0, a), tl.zeros_like(a))
    x = dot(inverse, x, tl.zeros_like(x))
    return x - dot(b, x, tl.zeros_like(x))


@triton.jit
def delta_net_chunk_kernel(
    p_q,
    p_k,
    p_v,
    p_decay,
    p_beta,
    p_out,
    p_state,
    p_start,
    p_rows,
    p_first,
    p_end,
    p_row,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    scale,
    VALUE_HEADS: tl.constexpr,
    SHARES: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    FEW: tl.constexpr,
    SAVED: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,  # of a key dimension
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence, head = tl.program_id(0) // VALUE_HEADS, tl.program_id(0) % VALUE_HEADS
    i_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    i_part = tl.arange(0, PART)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    begin = tl.load(p_start + sequence)
    if tl.load(p_start + sequence + 1) - begin > FEW:
        own = tl.load(p_rows + sequence).to(tl.int64)
        p_own = p_state + (own * VALUE_HEADS + head) * (K_DIM * V_DIM)
        first, last = sequence_pieces(p_first, sequence, SAVED)
        piece = first
        while piece < last:
            end = tl.load(p_end + piece + 1)
            chunk = begin
            while chunk < end:
                token = tl.cast(chunk, tl.int64) + tl.arange(0, CHUNK)
                m = token < end
                m_v = m[:, None] & (i_v < V_DIM)
                decay = tl.load(p_decay + token * decay_stride + head, mask=m, other=0.0)
                p_after = p_decay + (token + 1) * decay_stride + head
                after = tl.load(p_after, mask=(token + 1 < end) & (tl.arange(0, CHUNK) < CHUNK - 1), other=0.0)
                beta = tl.load(p_beta + token * beta_stride + head, mask=m, other=0.0)[:, None]
                v = tl.load(p_v + token[:, None] * v_stride + head * V_DIM + i_v, mask=m_v, other=0.0).to(
                    tl.float32
                )
                p_queries = p_q + token[:, None] * q_stride + head // SHARES * K_DIM
                p_keys = p_k + token[:, None] * k_stride + head // SHARES * K_DIM
                key_key = tl.zeros([CHUNK, CHUNK], tl.float32)
                query_key = tl.zeros([CHUNK, CHUNK], tl.float32)
                from_key = tl.zeros([CHUNK, BLOCK_V], tl.float32)
                from_query = tl.zeros([CHUNK, BLOCK_V], tl.float32)
                for part in range(0, K_DIM, PART):
                    i_k = part + i_part
                    m_k = m[:, None] & (i_k < K_DIM)[None, :]
                    k = tl.load(p_keys + i_k[None, :], mask=m_k, other=0.0).to(tl.float32)
                    q = tl.load(p_queries + i_k[None, :], mask=m_k, other=0.0).to(tl.float32) * scale
                    m_s = (i_k < K_DIM)[:, None] & (i_v < V_DIM)
                    state = tl.load(p_own + i_k[:, None] * V_DIM + i_v, mask=m_s, other=0.0)
                    keys = tl.trans(k)
                    key_key = dot(k, keys, key_key)
                    query_key = dot(q, keys, query_key)
                    from_key = dot(k, state, from_key)
                    from_query = dot(q, state, from_query)
                since = tl.exp(tl.cumsum(decay, 0))[:, None]
                until_end = tl.exp(tl.cumsum(after, 0, reverse=True))[:, None]
                between = tl.exp(tl.cumsum(tl.where(i > j, decay[:, None], 0.0), 0))
                a = tl.where(i > j, key_key * between * beta, 0.0)
                delta = solve_lower(a, beta * (v - since * from_key), i, j, CHUNK)
                out = dot(tl.where(i >= j, query_key * between, 0.0), delta, since * from_query)
                p_here = p_out + (token[:, None] * VALUE_HEADS + head) * V_DIM + i_v
                tl.store(p_here, round_to_dtype(out, p_out.dtype.element_ty), mask=m_v)
                fade, delta = tl.exp(tl.sum(decay, 0)), delta * until_end
                tl.debug_barrier()  # all threads have read the state
                for part in range(0, K_DIM, PART):
                    i_k = part + i_part
                    m_k = m[:, None] & (i_k < K_DIM)[None, :]
                    k = tl.load(p_keys + i_k[None, :], mask=m_k, other=0.0).to(tl.float32)
                    p = p_own + i_k[:, None] * V_DIM + i_v
                    m_s = (i_k < K_DIM)[:, None] & (i_v < V_DIM)
                    state = dot(tl.trans(k), delta, tl.load(p, mask=m_s, other=0.0) * fade)
                    tl.store(p, state, mask=m_s)
                tl.debug_barrier()  # the state is written
                chunk += CHUNK
            saved = tl.load(p_row + piece).to(tl.int64)
            p_saved = p_state + (saved * VALUE_HEADS + head) * (K_DIM * V_DIM)
            if saved != own:
                for part in range(0, K_DIM, PART):
                    i_k = part + i_part
                    m_s = (i_k < K_DIM)[:, None] & (i_v < V_DIM)
                    state = tl.load(p_own + i_k[:, None] * V_DIM + i_v, mask=m_s, other=0.0)
                    tl.store(p_saved + i_k[:, None] * V_DIM + i_v, state, mask=m_s)
            begin = end
            piece += 1


def delta_net_unsupported(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> str | None:
    if reason := gpu_unsupported(v):
        return reason
    if batch.state_slots is None:
        return "the state slots are not on the device"
    if any(x.dtype not in FLOAT_DTYPES for x in (q, k, v)) or cache.matrix.dtype != torch.float32:
        return "inputs or states are in float64"
    return None if k.shape[-1] <= MAX_KEY_DIM else f"keys are wider than {MAX_KEY_DIM}"


def dense_tokens(x: Tensor) -> Tensor:
    """Return [T, ...] with the elements of each token contiguous; tokens may be strided."""
    return x if x[0].is_contiguous() else x.contiguous()


@kernel("delta_net", "triton-chunks", delta_net_unsupported, first=True)
def delta_net(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not len(v):
        return out
    q, k, v, decay, beta = (dense_tokens(x) for x in (q, k, v, decay, beta))
    (heads, value_dim), key_dim, pieces = v.shape[1:], k.shape[-1], batch.state_segments
    columns = min(BLOCK_COLUMNS, max(16, triton.next_power_of_2(value_dim)))
    sequences = len(batch.query_start) - 1
    grid = (sequences * heads, triton.cdiv(value_dim, columns))
    arguments: dict[str, Any] = {"p_q": q, "p_k": k, "p_v": v, "p_decay": decay, "p_beta": beta, "p_out": out}
    arguments |= {f"{name}_stride": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v))}
    arguments |= {"decay_stride": decay.stride(0), "beta_stride": beta.stride(0), "scale": key_dim**-0.5}
    arguments |= {"p_state": cache.matrix, "p_start": batch.query_start, "p_rows": batch.state_slots}
    arguments |= {
        "p_first": pieces.first if pieces else None,
        "p_end": pieces.end if pieces else batch.query_start,
    }
    arguments |= {
        "p_row": pieces.state_slot if pieces else batch.state_slots,
        "SAVED": pieces is not None,
        "FEW": MAX_STEP_TOKENS,
    }
    arguments |= {"VALUE_HEADS": heads, "SHARES": heads // k.shape[1], "K_DIM": key_dim, "V_DIM": value_dim}
    arguments |= {"BLOCK_V": columns}
    if batch.uniform_query_len is None or batch.uniform_query_len <= MAX_STEP_TOKENS:
        launch_kernel(
            delta_net_step_kernel,
            grid,
            4,
            device=v.device,
            contract=False,
            **arguments,
            BLOCK_K=triton.next_power_of_2(key_dim),
        )
    if batch.max_query_len > MAX_STEP_TOKENS:
        launch_kernel(
            delta_net_chunk_kernel, grid, 4, device=v.device, **arguments, CHUNK=CHUNK_TOKENS, PART=KEY_PART
        )
    return out


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    def call(sequences: int, tokens: int) -> object:
        c, meta = DeltaNetConfig(16, 32, 128, 128, 4), torch.device("meta")
        q = torch.empty(sequences * tokens, 16, 128, device=meta)
        v = torch.empty(sequences * tokens, 32, 128, dtype=torch.bfloat16, device=meta)
        decay = torch.empty(sequences * tokens, 32, device=meta)
        start = torch.empty(sequences + 1, dtype=torch.int32, device=meta)
        rows, places = start[:-1], torch.empty(sequences * tokens, dtype=torch.int64, device=meta)
        batch = Batch(places, places, start, rows, rows, places, places, 16, tokens, tokens, rows)
        return delta_net(q, q, v, decay, decay, RecurrentCache(4, c, torch.bfloat16, meta), batch)

    yield "32 heads of 128 x 128, one token", lambda: call(2, 1)
    yield "32 heads of 128 x 128, chunks", lambda: call(2, 2048)
