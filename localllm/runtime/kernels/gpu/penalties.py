"""Bias and penalties from tokens on the device: `sampler.apply_penalties` in two kernels.

`mark_history_kernel` adds the bias, and marks for each token of the vocabulary whether repetition_penalty applies
to it and how often it occurs in the answer; it reads 4 bytes per token of the history. `peaks_kernel` of
`sampling.py` reads the marks, 4 bytes per token of the vocabulary, applies them and resets them. Marks are sums of
integers, independent of the order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import allow_next_kernel, wait_for_inputs

SEEN_BIT = tl.constexpr(2**30)  # above every count
# Tokens of a history per program; estimated: 8 per thread, and 128 programs for 131,072 tokens.
HISTORY_BLOCK = 1024


@dataclass(frozen=True)
class TokenHistory:
    """Rows are indexed by history slot, independent of the order in a bucket."""

    tokens: Tensor  # [rows, context] int32, prompt and answer
    marks: Tensor  # [rows, vocab] int32, 0 between steps


@dataclass(frozen=True)
class LogitBiases:
    token: Tensor  # [B, max biases] int32, -1 behind a row's last
    value: Tensor  # [B, max biases] float32


@triton.jit
def mark_history_kernel(
    p_logits,
    s_logits,
    vocabulary,
    p_live,
    p_history,
    p_position,
    p_answer,
    p_last,
    p_tokens,
    context,
    p_marks,
    p_bias_token,
    p_bias,
    BIASES: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    if tl.load(p_live + row) == 0:
        return
    if part == 0:
        i_bias = row * BIASES + tl.arange(0, BIASES)
        token = tl.load(p_bias_token + i_bias)
        named = (token >= 0) & (token < vocabulary)
        p_logit = p_logits + row * s_logits + token
        logit = tl.load(p_logit, mask=named, other=0.0)
        tl.debug_barrier()  # all threads have read the logits, also copies that are not stored
        tl.store(p_logit, logit + tl.load(p_bias + i_bias), mask=named)
        return
    history = tl.load(p_history + row).to(tl.int64)
    position = tl.load(p_position + row)
    begin = (part - 1) * PART
    if (history < 0) | (begin >= position):
        return
    last = tl.load(p_last + row)
    i_token = begin + tl.arange(0, PART)
    known = i_token < position
    token = tl.load(p_tokens + history * context + i_token, mask=known, other=0)
    known &= token < vocabulary
    p_mark = p_marks + history * vocabulary + token
    seen = i_token >= tl.where(last < 0, 0, position - last)
    tl.atomic_or(p_mark, SEEN_BIT, mask=known & seen, sem="relaxed")
    tl.atomic_add(p_mark, 1, mask=known & (i_token >= tl.load(p_answer + row)), sem="relaxed")


@triton.jit
def apply_penalties(logit, mark, repetition, presence, frequency):
    scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(mark >= SEEN_BIT, scaled, logit)
    count = mark & (SEEN_BIT - 1)
    return tl.where(count > 0, logit - (presence + frequency * count.to(tl.float32)), logit)
