"""The gated delta rule token by token (formula in `kernels/delta_net.py`): each head's state is read and written
once per token.

Faster than torch's matrix products over chunks, and the result does not depend on where a chunk begins.
"""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource, cpu_supported
from localllm.runtime.kernels.cpu.elementwise import exp
from localllm.runtime.kernels.cpu.ir import FLOAT, LANES, Program
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

BLOCK_COLUMNS = 8 * LANES  # columns of a state per pass: their sums stay in registers


def emit_delta_net(p: Program, dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    """q, k, v, decay, beta -> out, updating `states`; shapes as in `gated_delta_rule`.

    pieces [count, 4] int64, each tokens of one sequence: the first token, number of tokens, slot of the state
    before them, slot of the state after them. A thread computes all pieces in order for its share of the heads.
    """
    q, k, v, decay, beta, states, out, pieces, scratch = p.load_addresses(9)
    count, key_heads, heads = p.load_counts(3, begin=9)
    element, row_bytes = ELEMENT_TYPES[dtype], value_dim * 4
    state_bytes = key_dim * row_bytes
    zero, one, rows = (p.index_constant(number) for number in (0, 1, key_dim))
    begin, end = p.part_range(heads)
    delta = p.address(scratch, p.part * (len(range(0, value_dim, LANES)) * 64))
    with p.loop(begin, end) as head, p.loop(zero, count) as piece:
        first, tokens, source, target = (p.load(p.long, pieces, piece * 32 + 8 * i) for i in range(4))
        new = p.address(states, (target * heads + head) * state_bytes)
        # A piece without tokens, between two saves at one length, copies the state.
        before = p.address(states, (source * heads + head) * state_bytes)
        with p.loop(zero, p.max_index(one - tokens, zero) * key_dim) as row:
            for i in range(0, value_dim, LANES):
                offset, lanes = row * row_bytes, value_dim - i
                number = p.load_elements(FLOAT, p.address(before, offset), i, lanes)
                p.store_elements(number, FLOAT, p.address(new, offset), i, lanes)
        with p.loop(zero, tokens) as step:
            slot = p.select_nonzero(step, target, source)  # the first token reads the state before the piece
            old = p.address(states, (slot * heads + head) * state_bytes)
            token = first + step
            i_value, i_key = token * heads + head, token * key_heads + head / (heads / key_heads)
            query, key = (p.address(tensor, i_key * (key_dim * 4)) for tensor in (q, k))
            fade = exp(p, p.load_broadcast(FLOAT, decay, i_value * 4))
            rate = p.load_broadcast(FLOAT, beta, i_value * 4)
            scale = p.vector(key_dim**-0.5)
            q_dot_k = p.vector(0.0)
            for i in range(0, key_dim, LANES):
                lanes = key_dim - i
                number = p.load_elements(FLOAT, query, i, lanes) * scale
                q_dot_k = p.fma(number, p.load_elements(FLOAT, key, i, lanes), q_dot_k)
            q_dot_k = p.reduce_sum(q_dot_k).broadcast()
            for first_column in range(0, value_dim, BLOCK_COLUMNS):
                columns = range(first_column, min(first_column + BLOCK_COLUMNS, value_dim), LANES)
                q_state, k_state = ({i: p.variable(p.vector(0.0)) for i in columns} for _ in range(2))
                with p.loop(zero, rows) as row:
                    q_row, k_row = (
                        p.load_broadcast(FLOAT, query, row * 4) * scale,
                        p.load_broadcast(FLOAT, key, row * 4),
                    )
                    old_row = p.address(old, row * row_bytes)
                    for i in columns:
                        number = p.load_elements(FLOAT, old_row, i, value_dim - i)
                        q_state[i].value = p.fma(number, q_row, q_state[i].value)
                        k_state[i].value = p.fma(number, k_row, k_state[i].value)
                for i in columns:
                    offset = i_value * (value_dim * dtype.itemsize)
                    value = p.load_elements(element, p.address(v, offset), i, value_dim - i)
                    change = (value - fade * k_state[i].value) * rate
                    p.store(change, delta, 4 * i)
                    result = p.fma(fade, q_state[i].value, q_dot_k * change)
                    p.store_elements(result, element, p.address(out, offset), i, value_dim - i)
                with p.loop(zero, rows) as row:
                    k_row, offset = p.load_broadcast(FLOAT, key, row * 4), row * row_bytes
                    for i in columns:
                        number = p.load_elements(FLOAT, p.address(old, offset), i, value_dim - i)
                        updated = p.fma(k_row, p.load_floats(FLOAT, delta, 4 * i), number * fade)
                        p.store_elements(updated, FLOAT, p.address(new, offset), i, value_dim - i)


@CompileOnce
def compile_delta_net(dtype: torch.dtype, key_dim: int, value_dim: int) -> KernelSource:
    return KernelSource(lambda p: emit_delta_net(p, dtype, key_dim, value_dim), "delta_net", 12)


def unsupported(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor) -> str | None:
    """Return why the kernel does not support these tensors, or None if it does."""
    if not all(tensor.is_cpu for tensor in (q, k, v, decay, beta, states)):
        return f"v is on {v.device}"
    if v.dtype not in ELEMENT_TYPES or any(
        tensor.dtype != torch.float32 for tensor in (q, k, decay, beta, states)
    ):
        return "q, k, decay, beta or states are not float32"
    return None if cpu_supported() else "no kernel is compiled for this processor"


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, batch: Batch
) -> Tensor:
    """Shapes as in `kernels.delta_net`; states: [slots, value_heads, key_dim, value_dim], updated -> as v"""
    spans = []
    for span in batch.spans:
        source = span.state_slot
        for piece, target in span.split_at_saves():
            spans.append((piece.start, piece.stop - piece.start, source, target))
            source = target
    pieces = torch.tensor(spans, dtype=torch.int64)
    q, k, v, decay, beta = (tensor.contiguous() for tensor in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    scratch = torch.empty(torch.get_num_threads() * (v.shape[2] + LANES))
    assert states.is_contiguous()
    compile_delta_net(v.dtype, k.shape[2], v.shape[2])(
        *(tensor.data_ptr() for tensor in (q, k, v, decay, beta, states, out, pieces, scratch)),
        *(len(pieces), k.shape[1], v.shape[1]),
    )
    return out
