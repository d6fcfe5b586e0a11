"""Bias and penalties, from tokens that only the device knows: `sampler.adjust` in two kernels.

`mark` adds the bias, and notes for each token of the vocabulary whether repetition_penalty sees it and how often it
stands in the answer: 4 bytes for a token of the history. `peaks` of `sampling.py` reads the notes (4 bytes for a token
of the vocabulary), applies them and wipes them out. Notes are sums of whole numbers, so their order does not matter.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import let_next_start, start, wait_for_inputs

SEEN = tl.constexpr(2**30)  # above every count
BLOCK = (
    1024  # tokens of history a program: arithmetic, 8 a thread, so that 128k take as many programs as a GPU runs
)


@dataclass(frozen=True)
class History:
    """Rows are those of the engine's sequences, whatever their place in a bucket."""

    tokens: Tensor  # [rows, context] int32, prompt and answer
    marks: Tensor  # [rows, vocab] int32, 0 between steps


@dataclass(frozen=True)
class Biases:
    token: Tensor  # [B, most] int32, -1 behind a row's last
    value: Tensor  # [B, most] float32


@triton.jit
def mark_kernel(
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(p_live + row) == 0:
        return
    if part == 0:
        i_bias = row * BIASES + tl.arange(0, BIASES)
        token = tl.load(p_bias_token + i_bias)
        named = (token >= 0) & (token < vocabulary)
        p_logit = p_logits + row * s_logits + token
        logit = tl.load(p_logit, mask=named, other=0.0)
        tl.store(p_logit, logit + tl.load(p_bias + i_bias), mask=named)
        return
    history = tl.load(p_history + row).to(tl.int64)
    position = tl.load(p_position + row)
    begin = (part - 1) * BLOCK
    if (history < 0) | (begin >= position):
        return
    last = tl.load(p_last + row)
    i_token = begin + tl.arange(0, BLOCK)
    known = i_token < position
    token = tl.load(p_tokens + history * context + i_token, mask=known, other=0)
    known &= token < vocabulary
    p_mark = p_marks + history * vocabulary + token
    tl.atomic_or(p_mark, SEEN, mask=known & ((last < 0) | (i_token >= position - last)))
    tl.atomic_add(p_mark, 1, mask=known & (i_token >= tl.load(p_answer + row)))


@triton.jit
def penalized(logit, mark, repetition, presence, frequency):
    scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(mark >= SEEN, scaled, logit)
    count = mark & (SEEN - 1)
    return tl.where(count > 0, logit - (presence + frequency * count.to(tl.float32)), logit)


def mark(
    logits: Tensor,
    live: Tensor,
    history_row: Tensor,
    position: Tensor,
    answer: Tensor,
    last: Tensor,
    history: History,
    biases: Biases,
) -> None:
    """logits: [B, vocab] float32, changed in place; the next five: [B]."""
    context = history.tokens.shape[1]
    start(
        mark_kernel,
        (len(logits), 1 + triton.cdiv(context, BLOCK)),
        warps=4,
        device=logits.device,
        p_logits=logits,
        s_logits=logits.stride(0),
        vocabulary=logits.shape[1],
        p_live=live,
        p_history=history_row,
        p_position=position,
        p_answer=answer,
        p_last=last,
        p_tokens=history.tokens,
        context=context,
        p_marks=history.marks,
        p_bias_token=biases.token,
        p_bias=biases.value,
        BIASES=biases.token.shape[1],
        BLOCK=BLOCK,
    )
