"""A matrix product per head for few tokens: out[t, h] = x[t, h] W[h].

x: [T, heads, in]; W: [heads, in, out] or [heads, out, in]. A program processes 16 tokens, the minimum for tensor
cores, so that a token's result depends neither on their number nor on the others.

Bytes: heads * in * out * itemsize for every 16 tokens.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import allow_next_kernel, dot, launch_kernel, wait_for_inputs


@triton.jit(do_not_specialize=["tokens"])
def per_head_matmul_kernel(
    p_out,
    p_x,
    p_w,
    tokens,
    x_token,
    x_head,
    HEADS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OUT_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply per head. OUT_FIRST: W is [heads, out, in]."""
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    i_head = tl.program_id(1)
    o_token = tl.program_id(2) * 16 + tl.arange(0, 16)
    m_token = o_token < tokens
    o_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = o_out < OUT
    p_w += i_head.to(tl.int64) * (IN * OUT)
    p_x += i_head * x_head
    acc = tl.zeros([16, BLOCK_OUT], tl.float32)
    for at in range(0, IN, BLOCK_IN):
        o_in = at + tl.arange(0, BLOCK_IN)
        m_in = o_in < IN
        o_x = o_token.to(tl.int64) * x_token
        x = tl.load(p_x + o_x[:, None] + o_in[None, :], mask=m_token[:, None] & m_in[None, :], other=0.0)
        if OUT_FIRST:
            o_w = o_out[:, None] * IN + o_in[None, :]
            w = tl.trans(tl.load(p_w + o_w, mask=m_out[:, None] & m_in[None, :], other=0.0))
        else:
            o_w = o_in[:, None] * OUT + o_out[None, :]
            w = tl.load(p_w + o_w, mask=m_in[:, None] & m_out[None, :], other=0.0)
        acc = dot(x, w, acc)
    o_row = (o_token.to(tl.int64) * HEADS + i_head) * OUT
    m_row = m_token[:, None] & m_out[None, :]
    tl.store(p_out + o_row[:, None] + o_out[None, :], acc.to(p_out.dtype.element_ty), mask=m_row)


def per_head_matmul(x: Tensor, w: Tensor, *, out_first: bool) -> Tensor:
    """Multiply per head. Returns [T, heads, out].

    x: [T, heads, in], its last dimension dense; w: [heads, in, out], or [heads, out, in] if out_first. With 64
    columns per program, 16 heads of 512 make 128 programs.
    """
    size = w.shape[1] if out_first else w.shape[2]
    out = x.new_empty(*x.shape[:2], size)
    launch_kernel(
        per_head_matmul_kernel,
        (triton.cdiv(size, 64), x.shape[1], triton.cdiv(len(x), 16)),
        warps=4,
        stages=3,
        device=x.device,
        p_out=out,
        p_x=x,
        p_w=w,
        tokens=len(x),
        x_token=x.stride(0),
        x_head=x.stride(1),
        HEADS=x.shape[1],
        IN=x.shape[2],
        OUT=size,
        BLOCK_IN=64,
        BLOCK_OUT=64,
        OUT_FIRST=out_first,
    )
    return out
