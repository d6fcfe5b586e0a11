"""Parts shared by the attention kernels: reading a paged cache in any of its formats, and the online softmax.

A tile of keys always begins at a multiple of its length, counted in positions, and keys that a token does not
attend to leave its row unchanged to the bit: sums get + 0, maxima stay, factors are 1. So a token's result depends
neither on the other tokens of a tile nor on other sequences.
"""

# Triton's types of constants and tensors differ from their use in kernels.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.quant.packing import MIN_WORKSPACE_TOKENS
from localllm.quant.vectors import INT4
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.launch import PTX, dot

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2_E), and the hardware has exp2
MIN_SCORE = tl.constexpr(-1e30)  # minus infinity in running maxima: the difference of two of these is not NaN
MAX_DECODE_TOKENS = (
    MIN_WORKSPACE_TOKENS  # sequences with no more new tokens are processed by the kernels that split the context
)

EXAMPLE_CONTEXT = 32768  # tokens, in the examples
META_DEVICE = torch.device("meta")

# Formats of a cache. 8-bit values are read as pairs of adjacent dimensions, because operands of tensor cores are
# gathered in units of 16 bits, and split in registers: even and odd dimensions are processed separately. A byte
# is such a pair of 4-bit values.
FORM_PLAIN, FORM_INT8, FORM_FP8, FORM_INT4 = (tl.constexpr(i) for i in range(4))
CACHE_FORMS = {torch.int8: FORM_INT8.value, torch.float8_e4m3fn: FORM_FP8.value, INT4: FORM_INT4.value}

# Converts two pairs in a register to two registers of bfloat16, exactly and without a conversion instruction. With
# s the sign bit, an integer is (128 + its other bits) - (128 + s), both of which are bfloat16 of 0x4300 plus bits
# of it.
SPLIT_INT8_ASM = tl.constexpr("""{
    .reg .b32 odd, one, m, s;
    mov.b32 one, 0x3F803F80;
    shr.u32 odd, $2, 8;
    lop3.b32 m, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 s, $2, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $0, m, one, s;
    lop3.b32 m, odd, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 s, odd, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $1, m, one, s;
}""")
# With its bits moved to their places in bfloat16, whose exponent bias is 127, an e4m3 is 2**-120 of its value.
SPLIT_FP8_ASM = tl.constexpr("""{
    .reg .b32 odd, m, s, grow, zero;
    mov.b32 grow, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    mov.b32 odd, $2;
    shl.b32 s, $2, 8;
    shl.b32 m, $2, 4;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x07F007F0, s, 0xEA;
    fma.rn.bf16x2 $0, m, grow, zero;
    shr.u32 m, odd, 4;
    and.b32 s, odd, 0x80008000;
    lop3.b32 m, m, 0x07F007F0, s, 0xEA;
    fma.rn.bf16x2 $1, m, grow, zero;
}""")

# Converts four pairs of 4-bit values in a register to four registers of bfloat16. A value plus 8 becomes the last
# bits of 0x4300, which is 128, and 136 is subtracted.
SPLIT_INT4_ASM = tl.constexpr("""{
    .reg .b32 pairs, codes, m, one, minus;
    mov.b32 one, 0x3F803F80;
    mov.b32 minus, 0xC308C308;
    mov.b32 pairs, $4;
    prmt.b32 codes, pairs, 0, 0x4140;
    lop3.b32 m, codes, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $0, m, one, minus;
    shr.u32 codes, codes, 4;
    lop3.b32 m, codes, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $2, m, one, minus;
    prmt.b32 codes, pairs, 0, 0x4342;
    lop3.b32 m, codes, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $1, m, one, minus;
    shr.u32 codes, codes, 4;
    lop3.b32 m, codes, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $3, m, one, minus;
}""")


def cache_form(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a cache tensor as the kernels read it, and its format."""
    form = CACHE_FORMS.get(tensor.dtype, FORM_PLAIN.value)
    if form == FORM_PLAIN.value:
        return tensor, form
    return tensor.view(torch.int8 if form == FORM_INT4.value else torch.int16), form


def scale_words(scale: Tensor | None) -> Tensor | None:
    """Return scales as the kernels read them: a scale and its offset in a word of 32 bits."""
    return scale.view(torch.int32).squeeze(-1) if scale is not None and scale.dim() == 3 else scale


@triton.jit
def split_pairs(pair, FORM: tl.constexpr, TYPE: tl.constexpr):
    """Split pairs of 8-bit or 4-bit values into even and odd ones in TYPE, exact, without their scales."""
    if tl.bfloat16 == TYPE and PTX and FORM == FORM_INT4:
        return tl.inline_asm_elementwise(
            SPLIT_INT4_ASM, "=r,=r,=r,=r,r", [pair], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif tl.bfloat16 == TYPE and PTX:
        return tl.inline_asm_elementwise(
            SPLIT_INT8_ASM if FORM == FORM_INT8 else SPLIT_FP8_ASM,
            "=r,=r,r",
            [pair],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif FORM == FORM_INT8:
        return ((pair << 8) >> 8).to(tl.float32).to(TYPE), (pair >> 8).to(tl.float32).to(TYPE)
    elif FORM == FORM_INT4:
        return ((pair << 4) >> 4).to(tl.float32).to(TYPE), (pair >> 4).to(tl.float32).to(TYPE)
    else:
        # The bits at their places in float16, whose exponent bias is 15, not 7.
        even = ((pair << 7) & 0x3F80) | ((pair << 8) & -0x8000)
        odd = ((pair >> 1) & 0x3F80) | (pair & -0x8000)
        return (
            (even.to(tl.float16, bitcast=True).to(tl.float32) * 256).to(TYPE),
            (odd.to(tl.float16, bitcast=True).to(tl.float32) * 256).to(TYPE),
        )


@triton.jit
def block_table_slots(p_table, o_at, m_at, BLOCK: tl.constexpr):
    """Return the cache slots of positions o_at, int64. p_table: the sequence's row of the block table"""
    block = tl.load(p_table + o_at // BLOCK, mask=m_at, other=0)
    # Triton 3.6 takes every slot for a multiple of BLOCK, and would read too many bytes of a row at once.
    return tl.multiple_of(block.to(tl.int64) * BLOCK + o_at % BLOCK, 1)


@triton.jit
def load_rows(p_x, o_row, m_row, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load [rows, BLOCK_WIDTH], with zeros beyond the first WIDTH columns and, if MASKED, where m_row is false."""
    o_column = tl.arange(0, BLOCK_WIDTH)
    p_x += o_row[:, None] + o_column[None, :]
    if MASKED and WIDTH == BLOCK_WIDTH:
        return tl.load(p_x, mask=m_row[:, None], other=0)
    elif MASKED:
        return tl.load(p_x, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0)
    elif WIDTH == BLOCK_WIDTH:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_column < WIDTH)[None, :], other=0)


@triton.jit
def load_queries(p_q, o_row, m_row, DIM: tl.constexpr, BLOCK_WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Load rows of q in the cache's format: twice the same, or their even and their odd dimensions."""
    if FORM == FORM_PLAIN:
        q = load_rows(p_q, o_row, m_row, DIM, BLOCK_WIDTH, True)
        return q, q
    else:
        q = load_rows(p_q, o_row, m_row, DIM, 2 * BLOCK_WIDTH, True)
        return tl.split(tl.reshape(q, [q.shape[0], BLOCK_WIDTH, 2]))


@triton.jit
def store_output(
    p_out, o_row, m_row, acc, acc_odd, DIM: tl.constexpr, BLOCK_WIDTH: tl.constexpr, FORM: tl.constexpr
):
    """Store rows in the layout that `load_queries` reads."""
    if FORM != FORM_PLAIN:
        acc = tl.interleave(acc, acc_odd)
    o_column = tl.arange(0, acc.shape[1])
    m_out = m_row[:, None] & (o_column < DIM)[None, :]
    tl.store(p_out + o_row[:, None] + o_column[None, :], acc.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def zero_accumulator(ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Return the sums before the first tile; the second is unused if the cache is not quantized."""
    acc = tl.zeros([ROWS, BLOCK_WIDTH], tl.float32)
    if FORM == FORM_PLAIN:
        return acc, tl.zeros([ROWS], tl.float32)
    else:
        return acc, acc


@triton.jit
def load_scales(p_scale, o_vector, m_at, FORM: tl.constexpr):
    """Load scales and offsets of vectors, [keys] float32; without offsets twice the scales."""
    if FORM == FORM_INT4:
        both = tl.load(p_scale + o_vector, mask=m_at, other=0)
        return (both << 16).to(tl.float32, bitcast=True), (both & -0x10000).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(p_scale + o_vector, mask=m_at, other=0.0).to(tl.float32)
        return scale, scale


@triton.jit
def attend_tile(
    at,
    q,
    q_odd,
    acc,
    acc_odd,
    most,
    total,
    position,
    low,
    high,
    i_head,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_table,
    unit,
    bend,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    BENT: tl.constexpr,
    FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    MASKED: tl.constexpr,
    new_key=None,
    new_value=None,
):
    """Add keys at .. at + TILE - 1 of one key head to the online softmax of rows of queries.

    position: [rows], between low and high; FORM: of keys; MASKED: not every row attends to every key; new_key,
    new_value: of position `high`, as `as_stored` returns them, if they are not read from the cache.
    Returns acc, acc_odd, most, total.
    """
    o_at = at + tl.arange(0, TILE)
    m_at = o_at <= high
    if WINDOW:
        m_at &= o_at > low - WINDOW
    m_new = o_at == high
    if new_key is not None:
        m_at &= o_at != high
    o_vector = block_table_slots(p_table, o_at, m_at, BLOCK) * KV_HEADS + i_head
    k = load_rows(p_k, o_vector * WIDTH, m_at, WIDTH, BLOCK_WIDTH, MASKED)
    v = load_rows(p_v, o_vector * WIDTH, m_at, WIDTH, BLOCK_WIDTH, MASKED)
    if new_key is not None:
        k = tl.where(m_new[:, None], new_key[0], k)
        v = tl.where(m_new[:, None], new_value[0], v)  # pyright: ignore[reportOptionalSubscript]
    score = tl.zeros([q.shape[0], TILE], tl.float32)
    if FORM == FORM_PLAIN:
        score = dot(q, tl.trans(k), score)
    else:
        k, k_odd = split_pairs(k, FORM, q.dtype)
        score = dot(q_odd, tl.trans(k_odd), dot(q, tl.trans(k), score))
        scale, offset = load_scales(p_k_scale, o_vector, m_at, FORM)
        if new_key is not None:
            scale = tl.where(m_new, new_key[2], scale)
            offset = tl.where(m_new, new_key[3], offset)
        score *= scale[None, :]
        if FORM == FORM_INT4:  # q . (scale * codes + offset)
            score += (tl.sum(q.to(tl.float32), 1) + tl.sum(q_odd.to(tl.float32), 1))[:, None] * offset[None, :]
    if BENT:
        score = softcap_score(score, bend)
    if MASKED:
        seen = o_at[None, :] <= position[:, None]
        if WINDOW:
            seen &= o_at[None, :] > position[:, None] - WINDOW
        score = tl.where(seen, score, float("-inf"))
    weight, fading, most, total = online_softmax(score, unit, most, total)
    if FORM == FORM_PLAIN:
        acc = dot(weight.to(q.dtype), v, acc * fading[:, None])
    else:
        scale, offset = load_scales(p_v_scale, o_vector, m_at, VALUE_FORM)
        if new_value is not None:
            scale = tl.where(m_new, new_value[2], scale)
            offset = tl.where(m_new, new_value[3], offset)
        shift = 0.0
        if VALUE_FORM == FORM_INT4:
            shift = tl.sum(weight * offset[None, :], 1)[:, None]
        weight *= scale[None, :]
        v, v_odd = split_pairs(v, VALUE_FORM, q.dtype)
        if VALUE_FORM == FORM_INT4:
            acc = dot(weight.to(q.dtype), v, acc * fading[:, None] + shift)
            acc_odd = dot(weight.to(q.dtype), v_odd, acc_odd * fading[:, None] + shift)
        else:
            acc = dot(weight.to(q.dtype), v, acc * fading[:, None])
            acc_odd = dot(weight.to(q.dtype), v_odd, acc_odd * fading[:, None])
    return acc, acc_odd, most, total


@triton.jit
def online_softmax(score, unit, most, total):
    """Add a tile of scores [rows, keys] to the online softmax (Milakov and Gimelshein 2018), in powers of two.

    unit: > 0, the factor of scores; most: [rows], largest score so far, in that unit; total: [rows]
    Returns the tile's weights, the factor of the sums so far, and the new most and total.
    """
    largest = tl.maximum(most, tl.max(score, 1) * unit)
    weight = tl.exp2(score * unit - largest[:, None])
    fading = tl.exp2(most - largest)
    return weight, fading, largest, total * fading + tl.sum(weight, 1)


@triton.jit
def softcap_score(score, bend):
    """tanh(score * bend / (2 * LOG2_E)), in a form in which no score overflows"""
    return 1 - 2 / (tl.exp2(score * bend) + 1)


def score_units(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return `unit` and `bend` of an attention's scores."""
    if softcap:
        return softcap * LOG2_E.value, 2 * LOG2_E.value * scale / softcap
    return scale * LOG2_E.value, 0.0


def meta_batch(sequences: int, queries: int) -> Batch:
    """Return a batch on device `meta`, for the examples: sequences with `queries` new tokens each."""
    tokens = sequences * queries
    integers = (torch.empty(n, dtype=torch.int64, device=META_DEVICE) for n in (tokens, tokens, tokens, sequences))
    token_ids, positions, slot, logit_index = integers
    start, context = (torch.empty(n, dtype=torch.int32, device=META_DEVICE) for n in (sequences + 1, sequences))
    table = torch.empty(sequences, EXAMPLE_CONTEXT // 16, dtype=torch.int32, device=META_DEVICE)
    return Batch(token_ids, positions, start, context, table, slot, logit_index, 16, queries, queries)
