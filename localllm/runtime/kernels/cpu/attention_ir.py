"""The program behind attention over the paged cache: softmax(q k^T * scale) v with a running softmax in float32
(Milakov and Gimelshein 2018), over tiles of 16 positions that begin at multiples of 16.

What it gives for a query head of a token is one chain of operations over that head's keys, whatever other tokens
there are in the step, whichever of them came with it, and however the work is shared out.
"""

from dataclasses import dataclass

import torch

from localllm.runtime.kernels.cpu.ir import FLOAT, INT, LANES, SHORT, Program, Value
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

# Functions of 16 numbers at a time, in float32: a number's value depends on nothing else, where torch's depends
# on whether it stands in a whole vector or behind the last one.
EXP_MAX, EXP_MIN = 88.0, -87.3  # what exp gives beyond them is what it gives there: 2^127, and nearly zero
# exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2 (Cephes, expf)
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440e-4


def exp(p: Program, x: Value) -> Value:
    inside = p.minnum(p.maxnum(x, p.vector(EXP_MIN)), p.vector(EXP_MAX))
    power = (inside * 1.4426950408889634).round_to_int()
    n = power.to_float32()
    r = p.fma(n, p.vector(-LN_2_LOW), p.fma(n, p.vector(-LN_2_HIGH), inside))
    total = p.vector(EXP_POLYNOMIAL[0])
    for factor in EXP_POLYNOMIAL[1:]:
        total = p.fma(total, r, p.vector(factor))
    found = p.fma(total, r * r, r) + 1.0
    return p.propagate_nan(x, found * p.bitcast_float((power + 127) << 23))


def sigmoid(p: Program, x: Value) -> Value:
    """1 / (1 + exp(-x))"""
    return p.vector(1.0) / (exp(p, p.vector(0.0) - x) + 1.0)


def tanh(p: Program, x: Value) -> Value:
    """1 - 2 / (1 + exp(2 x)): within 1.2e-7, also where x is small."""
    return p.vector(1.0) - p.vector(2.0) / (exp(p, x * 2.0) + 1.0)


def sum_vectors(p: Program, vectors: list[Value]) -> Value:
    """The sum of each of 16 vectors, side by side: of all in the same pairs, 8, 4, 2 and 1 lanes apart."""
    for distance in (8, 4, 2, 1):
        low = [lane for lane in range(2 * LANES) if lane % (2 * distance) < distance]
        high = [lane + distance for lane in low]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [p.shuffle(a, b, low) + p.shuffle(a, b, high) for a, b in pairs]
    return vectors[0]


MASKED_SCORE = float("-inf")
SCRATCH_BYTES = 512  # bytes of scratch beside the records
ADDRESS_COUNT, INTEGER_COUNT, FACTOR_COUNT = 10, 7, 3
TASK_TOKENS = 16  # most of a task


@dataclass(frozen=True)
class AttentionSpec:
    """What of an attention a program is made for."""

    dtype: torch.dtype  # of queries and results
    cache_dtype: torch.dtype  # of keys and values
    key_dim: int
    value_dim: int
    block_size: int
    softcap: bool  # scores are
    sinks: bool
    heads_per_task: int  # heads of queries that one piece of work has, all with one head of keys

    @property
    def has_scales(self) -> bool:
        """Has each stored vector a scale?"""
        return self.cache_dtype not in ELEMENT_TYPES

    @property
    def head_blocks(self) -> list[tuple[int, int, int]]:
        """Heads begin .. end - 1, so many at a time: keys and values are read for all of those together."""
        fours, twos = self.heads_per_task // 4 * 4, self.heads_per_task // 2 * 2
        found = [(0, fours, 4), (fours, twos, 2), (twos, self.heads_per_task, 1)]
        return [block for block in found if block[0] < block[1]]

    @property
    def record_vectors(self) -> int:
        """Of a record: what a head of a token has gathered, then its largest score, then its total."""
        return -(-self.value_dim // LANES) + 2


def emit_attention(p: Program, form: AttentionSpec) -> None:
    """tasks [count, 4] int64: some tokens of one sequence: the first in q, how many, its position, its row of the
    table. Each task for each share of the heads of a key is one piece of work."""
    q, k, v, k_scale, v_scale, out, tasks, table, scratch, sinks = p.load_addresses(ADDRESS_COUNT)
    count, heads, kv_heads, width, window, k_stride, v_stride = p.load_counts(INTEGER_COUNT, begin=ADDRESS_COUNT)
    scale, cap, inverse = (
        p.load(FLOAT, p.arguments, 8 * (ADDRESS_COUNT + INTEGER_COUNT + i)) for i in range(FACTOR_COUNT)
    )
    size, kept, share = form.dtype.itemsize, form.cache_dtype.itemsize, form.heads_per_task
    record = form.record_vectors * 64
    of_key = heads / kv_heads
    slots = p.address(scratch, p.part * (share * record * TASK_TOKENS + SCRATCH_BYTES))  # of a tile
    weights, mine = p.address(slots, 8 * LANES), p.address(slots, SCRATCH_BYTES)
    begin, end = p.part_range(count * (heads / share))
    with p.loop(begin, end) as work:
        task = p.address(tasks, work / (heads / share) * 32)
        head = (work - work / (heads / share) * (heads / share)) * share
        key_head = head / of_key
        first, tokens, position, row = (p.load(p.long, task, 8 * i) for i in range(4))
        blocks = p.address(table, row * width * 4)
        newest = position + tokens - 1
        with (
            p.loop(p.index_constant(0), tokens) as token,
            p.loop(p.index_constant(0), p.index_constant(share)) as one,
        ):
            start = p.address(mine, (token * share + one) * record)
            for i in range(form.record_vectors):
                p.store(p.vector(0.0), start, 64 * i)
            largest = p.vector(MASKED_SCORE)
            if form.sinks:
                largest = p.load_broadcast(FLOAT, sinks, (head + one) * 4)
                p.store(p.vector(1.0), start, 64 * (form.record_vectors - 1))
            p.store(largest, start, 64 * (form.record_vectors - 2))
        with p.loop(first_tile(p, position, window), newest / LANES + 1) as tile:
            for lane in range(LANES):
                at = p.min_index(tile * LANES + lane, newest)
                block = p.extend_index(p.load(INT, blocks, at / form.block_size * 4))
                p.store(block * form.block_size + p.modulo(at, form.block_size), slots, 8 * lane)
            with p.loop(p.index_constant(0), tokens) as token:
                now = position + token
                low = p.max_index(now + 1 - window - tile * LANES, p.index_constant(0))
                high = p.min_index(now + 1 - tile * LANES, p.index_constant(LANES))
                some = p.min_index(
                    p.max_index(high - low, p.index_constant(0)), p.index_constant(1)
                )  # may be hidden altogether
                for begin_head, end_head, at_once in form.head_blocks:
                    heads_here = p.loop(p.index_constant(begin_head), p.index_constant(end_head), at_once)
                    with p.loop(p.index_constant(0), some), heads_here as one:
                        states = [p.address(mine, (token * share + one + i) * record) for i in range(at_once)]
                        query = p.address(q, ((first + token) * heads + head + one) * (form.key_dim * size))
                        keys = p.address(k, key_head * (form.key_dim * kept))
                        values = p.address(v, key_head * (form.value_dim * kept))
                        found = tile_scores(p, form, query, keys, slots, k_stride * kept, at_once)
                        of_keys = of_values = None
                        if form.has_scales:
                            of_keys = load_scales(p, k_scale, slots, kv_heads, key_head)
                            of_values = load_scales(p, v_scale, slots, kv_heads, key_head)
                        fadings = []
                        for i, score in enumerate(found):
                            score = (score * of_keys if of_keys else score) * scale.broadcast()
                            if form.softcap:
                                score = tanh(p, score * inverse.broadcast()) * cap.broadcast()
                            score = p.select_lanes(score, low, high, p.vector(MASKED_SCORE))
                            fading, weight = softmax_weights(p, form, states[i], score, low, high)
                            if of_values:
                                weight = p.select_lanes(weight * of_values, low, high, p.vector(0.0))
                            p.store(weight, weights, 64 * i)
                            fadings.append(fading)
                        accumulate_values(
                            p, form, states, fadings, values, slots, v_stride * kept, weights, low, high
                        )
        with (
            p.loop(p.index_constant(0), tokens) as token,
            p.loop(p.index_constant(0), p.index_constant(share)) as one,
        ):
            state = p.address(mine, (token * share + one) * record)
            total = p.load_floats(FLOAT, state, 64 * (form.record_vectors - 1))
            written = p.address(out, ((first + token) * heads + head + one) * (form.value_dim * size))
            for i in range(form.record_vectors - 2):
                found = p.load_floats(FLOAT, state, 64 * i) / total
                left = form.value_dim - LANES * i
                if left >= LANES:
                    p.store_floats(found, ELEMENT_TYPES[form.dtype], written, LANES * i * size)
                else:
                    p.store_first(
                        found, ELEMENT_TYPES[form.dtype], written, LANES * i * size, p.index_constant(left)
                    )


def first_tile(p: Program, position: Value, window: Value) -> Value:
    """Of the first token of a task; window: more than any position if there is none."""
    return p.max_index(position + 1 - window, p.index_constant(0)) / LANES


def softmax_weights(
    p: Program, form: AttentionSpec, state: Value, score: Value, low: Value, high: Value
) -> tuple[Value, Value]:
    """How much a head's sums so far fade, and the weights of a tile; its largest score and its total go on."""
    before = p.load_floats(FLOAT, state, 64 * (form.record_vectors - 2))
    total = p.load_floats(FLOAT, state, 64 * (form.record_vectors - 1))
    largest = p.maxnum(before, p.reduce_max(score).broadcast())
    fading = exp(p, before - largest)
    weight = p.select_lanes(exp(p, score - largest), low, high, p.vector(0.0))
    p.store(largest, state, 64 * (form.record_vectors - 2))
    p.store(p.fma(total, fading, p.reduce_sum(weight).broadcast()), state, 64 * (form.record_vectors - 1))
    return fading, weight


def tile_scores(
    p: Program, form: AttentionSpec, query: Value, keys: Value, slots: Value, stride: Value, heads: int
) -> list[Value]:
    """q k^T of a tile for some heads, a key in each lane: as many heads and keys at a time as registers hold."""
    at_once, found = LANES // heads, []
    for lane in range(0, LANES, at_once):
        places = [p.address(keys, p.load(p.long, slots, 8 * (lane + i)) * stride) for i in range(at_once)]
        totals = [[p.vector(0.0)] * at_once for _ in range(heads)]
        for i in range(0, form.key_dim, LANES):
            count = min(LANES, form.key_dim - i)
            beside = [load_elements(p, form.cache_dtype, place, i, count) for place in places]
            for head in range(heads):
                number = load_elements(p, form.dtype, query, head * form.key_dim + i, count)
                totals[head] = [p.fma(number, b, total) for b, total in zip(beside, totals[head], strict=True)]
        found.append(sum_vectors(p, [total for each in totals for total in each]))
    return transpose_scores(p, found)


def transpose_scores(p: Program, found: list[Value]) -> list[Value]:
    """1, 2 or 4 vectors, each of all heads for some keys -> a vector of all keys for each head."""
    width = LANES // len(found)  # lanes of a head
    if len(found) == 1:
        return found
    if len(found) == 2:
        a, b = found
        return [
            p.shuffle(a, b, [*range(at, at + width), *range(LANES + at, LANES + at + width)]) for at in (0, width)
        ]
    made = []
    for head in range(len(found)):
        lanes = [
            *range(width * head, width * (head + 1)),
            *range(LANES + width * head, LANES + width * (head + 1)),
        ]
        first, second = p.shuffle(found[0], found[1], lanes * 2), p.shuffle(found[2], found[3], lanes * 2)
        made.append(p.shuffle(first, second, [*range(LANES // 2), *range(LANES, LANES + LANES // 2)]))
    return made


def accumulate_values(
    p: Program,
    form: AttentionSpec,
    states: list[Value],
    fadings: list[Value],
    values: Value,
    slots: Value,
    stride: Value,
    weights: Value,
    low: Value,
    high: Value,
) -> None:
    """Fades what some heads have gathered and adds a tile's values by their weights, some columns at a time."""
    at_once = min(8, 16 // len(states)) * LANES
    for begin in range(0, form.value_dim, at_once):
        columns = range(begin, min(begin + at_once, form.value_dim), LANES)
        made = [
            [p.variable(p.load_floats(FLOAT, state, 4 * i) * fading) for i in columns]
            for state, fading in zip(states, fadings, strict=True)
        ]
        with p.loop(low, high) as lane:
            place = p.address(values, p.load(p.long, slots, lane * 8) * stride)
            beside = [
                load_elements(p, form.cache_dtype, place, i, min(LANES, form.value_dim - i)) for i in columns
            ]
            for head, totals in enumerate(made):
                weight = p.load_broadcast(FLOAT, weights, lane * 4 + 64 * head)
                for number, total in zip(beside, totals, strict=True):
                    total.value = p.fma(weight, number, total.value)
        for state, totals in zip(states, made, strict=True):
            for i, total in zip(columns, totals, strict=True):
                p.store(total.value, state, 4 * i)


def load_elements(p: Program, stored: torch.dtype, place: Value, begin: int, count: int) -> Value:
    """16 numbers of a vector, or `count` and zeros."""
    offset = begin * stored.itemsize
    if stored in ELEMENT_TYPES:
        if count == LANES:
            return p.load_floats(ELEMENT_TYPES[stored], place, offset)
        return p.load_first(ELEMENT_TYPES[stored], p.address(place, offset), p.index_constant(count))
    whole = p.load_signed_bytes(p.address(place, offset), count)
    if stored == torch.int8:
        return whole.to_float32()
    # e4m3: exponents counted from 7, float32's from 127; without its sign it is a float32 shifted by 20.
    return p.bitcast_float(((whole & 0x7F) << 20) | ((whole & 0x80) << 24)) * 2.0**120


def load_scales(p: Program, scales: Value, slots: Value, kv_heads: Value, head: Value) -> Value:
    """bfloat16, of each of a tile's vectors."""
    found = p.vector(0, INT)
    for lane in range(LANES):
        at = (p.load(p.long, slots, 8 * lane) * kv_heads + head) * 2
        found = p.insert_lane(found, lane, p.extend_short(p.load(SHORT, scales, at)))
    return p.bitcast_float(found << 16)
