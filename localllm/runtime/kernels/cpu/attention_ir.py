"""Kernel of attention over the paged KV cache: softmax(q k^T * scale) v with an online softmax in float32 (Milakov
and Gimelshein 2018), over tiles of 16 positions that begin at multiples of 16.

Batch invariant: the result for a query head of a token is one chain of operations over that head's keys,
independent of the other tokens of the step and of how the work is divided among threads.
"""

from dataclasses import dataclass

import torch

from localllm.quant.vectors import INT4
from localllm.runtime.kernels.cpu.elementwise import exp, tanh
from localllm.runtime.kernels.cpu.ir import FLOAT, INT, LANES, SHORT, Program, Value
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

MASKED_SCORE = float("-inf")
VECTOR_BYTES = 4 * LANES  # of float32
SCRATCH_BYTES = 512  # scratch of a thread in front of its records: 16 slots, then up to 4 vectors of weights
ADDRESS_COUNT, INTEGER_COUNT, FACTOR_COUNT = 10, 7, 3  # arguments of the kernel, in this order
TASK_TOKENS = 16  # maximum of a task


@dataclass(frozen=True)
class AttentionSpec:
    """Properties of an attention that a kernel is compiled for."""

    dtype: torch.dtype  # of queries and output
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    key_dim: int
    value_dim: int
    block_size: int
    softcap: bool
    sinks: bool
    heads_per_task: int  # query heads of a work item, all of one key head

    @property
    def head_blocks(self) -> list[tuple[int, int, int]]:
        """(begin, end, step) of query heads: keys and values are loaded once per `step` heads."""
        fours, twos = self.heads_per_task // 4 * 4, self.heads_per_task // 2 * 2
        blocks = [(0, fours, 4), (fours, twos, 2), (twos, self.heads_per_task, 1)]
        return [block for block in blocks if block[0] < block[1]]

    @property
    def record_vectors(self) -> int:
        """Vectors of a record, a head's softmax state: sum of weighted values, maximum score, sum of weights."""
        return -(-self.value_dim // LANES) + 2

    @property
    def max_offset(self) -> int:
        """Offset of the maximum score in a record, in bytes."""
        return VECTOR_BYTES * (self.record_vectors - 2)

    @property
    def total_offset(self) -> int:
        """Offset of the sum of weights in a record, in bytes."""
        return VECTOR_BYTES * (self.record_vectors - 1)


def emit_attention(p: Program, spec: AttentionSpec) -> None:
    """q, paged k and v -> out [T, heads, value_dim], for the tokens of `tasks`.

    tasks [count, 4] int64, each up to TASK_TOKENS tokens of one sequence: index of the first in q, number of
    tokens, position of the first, row of the block table. A work item is one task for `heads_per_task` query
    heads.
    """
    q, k, v, k_scale, v_scale, out, tasks, table, scratch, sinks = p.load_addresses(ADDRESS_COUNT)
    count, heads, kv_heads, width, window, k_stride, v_stride = p.load_counts(INTEGER_COUNT, begin=ADDRESS_COUNT)
    scale, cap, inverse_cap = (
        p.load(FLOAT, p.arguments, 8 * (ADDRESS_COUNT + INTEGER_COUNT + i)) for i in range(FACTOR_COUNT)
    )
    size, share = spec.dtype.itemsize, spec.heads_per_task
    key_size, value_size = spec.key_dtype.itemsize, spec.value_dtype.itemsize
    record_bytes = spec.record_vectors * VECTOR_BYTES
    group = heads / kv_heads
    slots = p.address(scratch, p.part * (share * record_bytes * TASK_TOKENS + SCRATCH_BYTES))
    weights, records = p.address(slots, 8 * LANES), p.address(slots, SCRATCH_BYTES)
    begin, end = p.part_range(count * (heads / share))
    with p.loop(begin, end) as work:
        task = p.address(tasks, work / (heads / share) * 32)
        head = (work - work / (heads / share) * (heads / share)) * share
        key_head = head / group
        first, tokens, position, row = (p.load(p.long, task, 8 * i) for i in range(4))
        blocks = p.address(table, row * width * 4)
        newest = position + tokens - 1
        with (
            p.loop(p.index_constant(0), tokens) as token,
            p.loop(p.index_constant(0), p.index_constant(share)) as i_head,
        ):
            record = p.address(records, (token * share + i_head) * record_bytes)
            for i in range(spec.record_vectors):
                p.store(p.vector(0.0), record, VECTOR_BYTES * i)
            largest = p.vector(MASKED_SCORE)
            if spec.sinks:
                largest = p.load_broadcast(FLOAT, sinks, (head + i_head) * 4)
                p.store(p.vector(1.0), record, spec.total_offset)
            p.store(largest, record, spec.max_offset)
        with p.loop(first_tile(p, position, window), newest / LANES + 1) as tile:
            for lane in range(LANES):
                key_position = p.min_index(tile * LANES + lane, newest)
                block = p.extend_index(p.load(INT, blocks, key_position / spec.block_size * 4))
                p.store(block * spec.block_size + p.modulo(key_position, spec.block_size), slots, 8 * lane)
            with p.loop(p.index_constant(0), tokens) as token:
                query_position = position + token
                low = p.max_index(query_position + 1 - window - tile * LANES, p.index_constant(0))
                high = p.min_index(query_position + 1 - tile * LANES, p.index_constant(LANES))
                # 0 where the causal mask or the window hides the whole tile, otherwise 1.
                visible = p.min_index(p.max_index(high - low, p.index_constant(0)), p.index_constant(1))
                for begin_head, end_head, step in spec.head_blocks:
                    head_loop = p.loop(p.index_constant(begin_head), p.index_constant(end_head), step)
                    with p.loop(p.index_constant(0), visible), head_loop as i_head:
                        head_records = [
                            p.address(records, (token * share + i_head + i) * record_bytes) for i in range(step)
                        ]
                        query = p.address(q, ((first + token) * heads + head + i_head) * (spec.key_dim * size))
                        keys = p.address(k, key_head * vector_bytes(spec.key_dtype, spec.key_dim))
                        values = p.address(v, key_head * vector_bytes(spec.value_dtype, spec.value_dim))
                        scores = tile_scores(p, spec, query, keys, slots, k_stride * key_size, step)
                        vectors = slots, kv_heads, key_head
                        key_scales, key_offsets = load_scales(p, spec.key_dtype, k_scale, *vectors)
                        value_scales, value_offsets = load_scales(p, spec.value_dtype, v_scale, *vectors)
                        corrections, shifts = [], []
                        for i, score in enumerate(scores):
                            score = score * key_scales if key_scales else score
                            if key_offsets:  # q . (scale * codes + offset)
                                score = p.fma(key_offsets, query_sum(p, spec, query, i), score)
                            score = score * scale.broadcast()
                            if spec.softcap:
                                score = tanh(p, score * inverse_cap.broadcast()) * cap.broadcast()
                            score = p.select_lanes(score, low, high, p.vector(MASKED_SCORE))
                            correction, weight = softmax_weights(p, spec, head_records[i], score, low, high)
                            if value_offsets:
                                shift = p.select_lanes(weight * value_offsets, low, high, p.vector(0.0))
                                shifts.append(p.reduce_sum(shift).broadcast())
                            if value_scales:
                                weight = p.select_lanes(weight * value_scales, low, high, p.vector(0.0))
                            p.store(weight, weights, VECTOR_BYTES * i)
                            corrections.append(correction)
                        stride = v_stride * value_size
                        accumulate_values(
                            p, spec, head_records, corrections, shifts, values, slots, stride, weights, low, high
                        )
        with (
            p.loop(p.index_constant(0), tokens) as token,
            p.loop(p.index_constant(0), p.index_constant(share)) as i_head,
        ):
            record = p.address(records, (token * share + i_head) * record_bytes)
            total = p.load_floats(FLOAT, record, spec.total_offset)
            result = p.address(out, ((first + token) * heads + head + i_head) * (spec.value_dim * size))
            for i in range(0, spec.value_dim, LANES):
                numbers = p.load_floats(FLOAT, record, 4 * i) / total
                p.store_elements(numbers, ELEMENT_TYPES[spec.dtype], result, i, spec.value_dim - i)


def first_tile(p: Program, position: Value, window: Value) -> Value:
    """Index of the first tile that the first token of a task attends to; without a window, `window` is huge."""
    return p.max_index(position + 1 - window, p.index_constant(0)) / LANES


def tile_scores(
    p: Program, spec: AttentionSpec, query: Value, keys: Value, slots: Value, stride: Value, heads: int
) -> list[Value]:
    """q k^T of a tile: one vector per head, one key per lane; 16 dot products are accumulated at a time."""
    keys_per_pass, sums = LANES // heads, []
    for lane in range(0, LANES, keys_per_pass):
        addresses = [p.address(keys, p.load(p.long, slots, 8 * (lane + i)) * stride) for i in range(keys_per_pass)]
        totals = [[p.vector(0.0)] * keys_per_pass for _ in range(heads)]
        for i in range(0, spec.key_dim, LANES):
            count = min(LANES, spec.key_dim - i)
            key_vectors = [load_elements(p, spec.key_dtype, address, i, count) for address in addresses]
            for head in range(heads):
                number = load_elements(p, spec.dtype, query, head * spec.key_dim + i, count)
                totals[head] = [
                    p.fma(number, b, total) for b, total in zip(key_vectors, totals[head], strict=True)
                ]
        sums.append(sum_vectors(p, [total for head_totals in totals for total in head_totals]))
    return transpose_scores(p, sums)


def query_sum(p: Program, spec: AttentionSpec, query: Value, head: int) -> Value:
    """Sum of a head's query, in all lanes."""
    total = p.vector(0.0)
    for i in range(0, spec.key_dim, LANES):
        count = min(LANES, spec.key_dim - i)
        total = total + load_elements(p, spec.dtype, query, head * spec.key_dim + i, count)
    return p.reduce_sum(total).broadcast()


def sum_vectors(p: Program, vectors: list[Value]) -> Value:
    """Sum each of 16 vectors into one lane of the result, added pairwise at distances 8, 4, 2, 1."""
    for distance in (8, 4, 2, 1):
        low = [lane for lane in range(2 * LANES) if lane % (2 * distance) < distance]
        high = [lane + distance for lane in low]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [p.shuffle(a, b, low) + p.shuffle(a, b, high) for a, b in pairs]
    return vectors[0]


def transpose_scores(p: Program, vectors: list[Value]) -> list[Value]:
    """1, 2 or 4 vectors, each with all heads for some keys -> one vector of all keys per head."""
    width = LANES // len(vectors)  # lanes of a head
    if len(vectors) == 1:
        return vectors
    if len(vectors) == 2:
        a, b = vectors
        return [
            p.shuffle(a, b, [*range(at, at + width), *range(LANES + at, LANES + at + width)]) for at in (0, width)
        ]
    transposed = []
    for head in range(len(vectors)):
        lanes = [
            *range(width * head, width * (head + 1)),
            *range(LANES + width * head, LANES + width * (head + 1)),
        ]
        first, second = (p.shuffle(a, b, lanes * 2) for a, b in (vectors[:2], vectors[2:]))
        transposed.append(p.shuffle(first, second, [*range(LANES // 2), *range(LANES, LANES + LANES // 2)]))
    return transposed


def softmax_weights(
    p: Program, spec: AttentionSpec, record: Value, score: Value, low: Value, high: Value
) -> tuple[Value, Value]:
    """Take a step of the online softmax of a head: update the maximum and the sum of weights in its record.

    Return the factor that rescales earlier sums, and the weights of the tile.
    """
    old_max = p.load_floats(FLOAT, record, spec.max_offset)
    total = p.load_floats(FLOAT, record, spec.total_offset)
    new_max = p.maxnum(old_max, p.reduce_max(score).broadcast())
    correction = exp(p, old_max - new_max)
    weight = p.select_lanes(exp(p, score - new_max), low, high, p.vector(0.0))
    p.store(new_max, record, spec.max_offset)
    p.store(p.fma(total, correction, p.reduce_sum(weight).broadcast()), record, spec.total_offset)
    return correction, weight


def accumulate_values(
    p: Program,
    spec: AttentionSpec,
    records: list[Value],
    corrections: list[Value],
    shifts: list[Value],
    values: Value,
    slots: Value,
    stride: Value,
    weights: Value,
    low: Value,
    high: Value,
) -> None:
    """Rescale the sums of some heads and add a tile's weighted values, as many columns at a time as registers
    hold.

    shifts: the heads' weighted offsets of values, in all lanes; empty if values have none
    """
    columns_per_pass = min(8, 16 // len(records)) * LANES
    for begin in range(0, spec.value_dim, columns_per_pass):
        columns = range(begin, min(begin + columns_per_pass, spec.value_dim), LANES)
        totals = []
        for head, (record, correction) in enumerate(zip(records, corrections, strict=True)):
            scaled = [p.load_floats(FLOAT, record, 4 * i) * correction for i in columns]
            totals.append([p.variable(total + shifts[head] if shifts else total) for total in scaled])
        with p.loop(low, high) as lane:
            address = p.address(values, p.load(p.long, slots, lane * 8) * stride)
            numbers = [
                load_elements(p, spec.value_dtype, address, i, min(LANES, spec.value_dim - i)) for i in columns
            ]
            for head, head_totals in enumerate(totals):
                weight = p.load_broadcast(FLOAT, weights, lane * 4 + VECTOR_BYTES * head)
                for number, total in zip(numbers, head_totals, strict=True):
                    total.value = p.fma(weight, number, total.value)
        for record, head_totals in zip(records, totals, strict=True):
            for i, total in zip(columns, head_totals, strict=True):
                p.store(total.value, record, 4 * i)


def load_elements(p: Program, dtype: torch.dtype, address: Value, begin: int, count: int) -> Value:
    """Load up to 16 numbers of any cache dtype as float32; lanes from `count` on are zero."""
    if dtype in ELEMENT_TYPES:
        return p.load_elements(ELEMENT_TYPES[dtype], address, begin, count)
    if dtype == INT4:
        return p.load_nibbles(p.address(address, begin // 2), count).to_float32()
    bits = p.load_signed_bytes(p.address(address, begin), count)
    if dtype == torch.int8:
        return bits.to_float32()
    # e4m3 without its sign is a float32 shifted by 20 bits; exponent biases 7 and 127 differ by 120.
    return p.bitcast_float(((bits & 0x7F) << 20) | ((bits & 0x80) << 24)) * 2.0**120


def vector_bytes(dtype: torch.dtype, dim: int) -> int:
    """Return the bytes of a cached vector without its scale."""
    return dim // 2 if dtype == INT4 else dim * dtype.itemsize


def load_scales(
    p: Program, dtype: torch.dtype, scales: Value, slots: Value, kv_heads: Value, head: Value
) -> tuple[Value | None, Value | None]:
    """Load the bfloat16 scale and offset of each of a tile's cached vectors as float32; None if it has none."""
    if dtype in ELEMENT_TYPES:
        return None, None
    bits = p.vector(0, INT)
    for lane in range(LANES):
        vector = p.load(p.long, slots, 8 * lane) * kv_heads + head
        if dtype == INT4:
            bits = p.insert_lane(bits, lane, p.load(INT, scales, vector * 4))
        else:
            bits = p.insert_lane(bits, lane, p.extend_short(p.load(SHORT, scales, vector * 2)))
    return p.bitcast_float(bits << 16), p.bitcast_float(bits & -(2**16)) if dtype == INT4 else None
