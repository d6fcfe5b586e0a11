"""The gated delta rule token by token (its formula stands in `kernels/delta_net.py`), each head's matrix read and
written once a token: faster than chunks of matrix products by torch, and a token's result does not depend on where
a chunk began."""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.kernels.cpu.attention_ir import exp
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce, cpu_supported
from localllm.runtime.kernels.cpu.ir import FLOAT, LANES, Element, Program, Value
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

BLOCK_COLUMNS = 8 * LANES  # columns of a matrix


def emit_delta_net(p: Program, kind: torch.dtype, key_dim: int, value_dim: int) -> None:
    """pieces [count, 4] int64: some tokens of one sequence: the first, how many, the row of states that they begin
    with and the one that they end in; one piece after another, heads side by side."""
    q, k, v, decay, beta, states, out, pieces, scratch = p.load_addresses(9)
    count, key_heads, heads = p.load_counts(3, begin=9)
    size = kind.itemsize
    matrix, columns = key_dim * value_dim * 4, range(0, value_dim, BLOCK_COLUMNS)
    begin, end = p.part_range(heads)
    delta = p.address(scratch, p.part * (len(range(0, value_dim, LANES)) * 64))
    with p.loop(begin, end) as head, p.loop(p.index_constant(0), count) as piece:
        first, tokens, source, target = (p.load(p.long, pieces, piece * 32 + 8 * i) for i in range(4))
        new = p.address(states, (target * heads + head) * matrix)
        # A piece without tokens, as between two saves at one length, leaves the state as it is.
        begun = p.address(states, (source * heads + head) * matrix)
        one, zero = p.index_constant(1), p.index_constant(0)
        with p.loop(zero, p.max_index(one - tokens, zero) * key_dim) as at:
            for i in range(0, value_dim, LANES):
                line, left = at * (value_dim * 4), min(LANES, value_dim - i)
                old = load_elements(p, FLOAT, p.address(begun, line), i, left)
                store_elements(p, old, FLOAT, p.address(new, line), i, left)
        with p.loop(p.index_constant(0), tokens) as step:
            # The first token of a piece reads from the row it begins with.
            row = p.select_nonzero(step, target, source)
            old = p.address(states, (row * heads + head) * matrix)
            token = first + step
            of_head, of_key = token * heads + head, token * key_heads + head / (heads / key_heads)
            query, key = (p.address(each, of_key * (key_dim * 4)) for each in (q, k))
            fade = exp(p, p.load_broadcast(FLOAT, decay, of_head * 4))
            rate = p.load_broadcast(FLOAT, beta, of_head * 4)
            scale = p.vector(key_dim**-0.5)
            both = p.vector(0.0)
            for i in range(0, key_dim, LANES):
                left = min(LANES, key_dim - i)
                both = p.fma(
                    load_elements(p, FLOAT, query, i, left) * scale, load_elements(p, FLOAT, key, i, left), both
                )
            both = p.reduce_sum(both).broadcast()
            for column in columns:
                places = range(column, min(column + BLOCK_COLUMNS, value_dim), LANES)
                lanes = {i: min(LANES, value_dim - i) for i in places}
                from_query, from_key = ({i: p.variable(p.vector(0.0)) for i in places} for _ in range(2))
                with p.loop(p.index_constant(0), p.index_constant(key_dim)) as at:
                    a, b = p.load_broadcast(FLOAT, query, at * 4) * scale, p.load_broadcast(FLOAT, key, at * 4)
                    here = p.address(old, at * (value_dim * 4))
                    for i in places:
                        held = load_elements(p, FLOAT, here, i, lanes[i])
                        from_query[i].value = p.fma(held, a, from_query[i].value)
                        from_key[i].value = p.fma(held, b, from_key[i].value)
                for i in places:
                    wanted = load_elements(
                        p, ELEMENT_TYPES[kind], p.address(v, of_head * (value_dim * size)), i, lanes[i]
                    )
                    change = (wanted - fade * from_key[i].value) * rate
                    p.store(change, delta, 4 * i)
                    made = p.fma(fade, from_query[i].value, both * change)
                    store_elements(
                        p, made, ELEMENT_TYPES[kind], p.address(out, of_head * (value_dim * size)), i, lanes[i]
                    )
                with p.loop(p.index_constant(0), p.index_constant(key_dim)) as at:
                    b, line = p.load_broadcast(FLOAT, key, at * 4), at * (value_dim * 4)
                    for i in places:
                        held = load_elements(p, FLOAT, p.address(old, line), i, lanes[i])
                        change = p.load_floats(FLOAT, delta, 4 * i)
                        store_elements(p, p.fma(b, change, held * fade), FLOAT, p.address(new, line), i, lanes[i])


def load_elements(p: Program, kind: Element, place: Value, begin: int, count: int) -> Value:
    offset = begin * (4 if kind == FLOAT else 2)
    if count == LANES:
        return p.load_floats(kind, place, offset)
    return p.load_first(kind, p.address(place, offset), p.index_constant(count))


def store_elements(p: Program, value: Value, kind: Element, place: Value, begin: int, count: int) -> None:
    offset = begin * (4 if kind == FLOAT else 2)
    if count == LANES:
        p.store_floats(value, kind, place, offset)
    else:
        p.store_first(value, kind, place, offset, p.index_constant(count))


@CompileOnce
def compile_delta_net(kind: torch.dtype, key_dim: int, value_dim: int) -> CompiledKernel:
    return CompiledKernel(lambda p: emit_delta_net(p, kind, key_dim, value_dim), "recur", 12)


def unsupported(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor) -> str | None:
    """Return why the kernel does not support these tensors, or None if it does."""
    if not all(each.is_cpu for each in (q, k, v, decay, beta, states)):
        return f"v is on {v.device}"
    if v.dtype not in ELEMENT_TYPES or any(each.dtype != torch.float32 for each in (q, k, decay, beta, states)):
        return "not all but v are float32"
    return None if cpu_supported() else "no kernel is compiled for this processor"


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, batch: Batch
) -> Tensor:
    """Shapes as of `kernels.delta_net`; states: [rows, value_heads, key_dim, value_dim], changed -> as v"""
    pieces = []
    for span in batch.spans:
        source = span.state_slot
        for piece, row in span.split_at_saves():
            pieces.append((piece.start, piece.stop - piece.start, source, row))
            source = row
    told = torch.tensor(pieces, dtype=torch.int64)
    q, k, v, decay, beta = (each.contiguous() for each in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    scratch = torch.empty(torch.get_num_threads() * (v.shape[2] + LANES))
    assert states.is_contiguous()
    compile_delta_net(v.dtype, k.shape[2], v.shape[2])(
        *(each.data_ptr() for each in (q, k, v, decay, beta, states, out, told, scratch)),
        *(len(pieces), k.shape[1], v.shape[1]),
    )
    return out
