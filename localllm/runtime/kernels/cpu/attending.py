"""The program behind attention over the paged cache: softmax(q k^T * scale) v with a running softmax in float32
(Milakov and Gimelshein 2018), over tiles of 16 positions that begin at multiples of 16.

What it gives for a query head of a token is one chain of operations over that head's keys, whatever other tokens
there are in the step, whichever of them came with it, and however the work is shared out.
"""

from dataclasses import dataclass

import torch

from localllm.runtime.kernels.cpu.functions import exp, sums, tanh
from localllm.runtime.kernels.cpu.layout import KINDS
from localllm.runtime.kernels.cpu.program import FLOAT, INT, LANES, SHORT, Program, Value

HIDDEN = float("-inf")
BESIDE = 256  # bytes of scratch beside the records
ADDRESSES, COUNTS, FACTORS = 10, 8, 3
TOKENS = 16  # most of a task


@dataclass(frozen=True)
class Form:
    """What of an attention a program is made for."""

    kind: torch.dtype  # of queries and results
    stored: torch.dtype  # of keys and values
    key_dim: int
    value_dim: int
    block_size: int
    capped: bool  # scores are
    sinks: bool

    @property
    def scaled(self) -> bool:
        """Has each stored vector a scale?"""
        return self.stored not in KINDS

    @property
    def vectors(self) -> int:
        """Of a record: what a head of a token has gathered, then its largest score, then its total."""
        return -(-self.value_dim // LANES) + 2


def attend(p: Program, form: Form) -> None:
    """tasks [count, 4] int64: some tokens of one sequence: the first in q, how many, its position, its row of the
    table. Each task for each share of the heads of a key is one piece of work."""
    q, k, v, k_scale, v_scale, out, tasks, table, scratch, sinks = p.addresses(ADDRESSES)
    count, heads, kv_heads, share, width, window, k_stride, v_stride = p.counts(COUNTS, begin=ADDRESSES)
    scale, cap, inverse = (p.load(FLOAT, p.arguments, 8 * (ADDRESSES + COUNTS + i)) for i in range(FACTORS))
    size, kept = form.kind.itemsize, form.stored.itemsize
    record = form.vectors * 64
    of_key = heads / kv_heads
    slots = p.at(scratch, p.part * (share * (record * TOKENS) + BESIDE))  # of a tile
    weights, mine = p.at(slots, 8 * LANES), p.at(slots, BESIDE)
    begin, end = p.share(count * (heads / share))
    with p.loop(begin, end) as work:
        task = p.at(tasks, work / (heads / share) * 32)
        head = (work - work / (heads / share) * (heads / share)) * share
        key_head = head / of_key
        first, tokens, position, row = (p.load(p.long, task, 8 * i) for i in range(4))
        blocks = p.at(table, row * width * 4)
        newest = position + tokens - 1
        with p.loop(p.index(0), tokens) as token, p.loop(p.index(0), share) as one:
            start = p.at(mine, (token * share + one) * record)
            for i in range(form.vectors):
                p.store(p.vector(0.0), start, 64 * i)
            largest = p.vector(HIDDEN)
            if form.sinks:
                largest = p.load_splat(FLOAT, sinks, (head + one) * 4)
                p.store(p.vector(1.0), start, 64 * (form.vectors - 1))
            p.store(largest, start, 64 * (form.vectors - 2))
        with p.loop(first_tile(p, position, window), newest / LANES + 1) as tile:
            for lane in range(LANES):
                at = p.less(tile * LANES + lane, newest)
                block = p.wide_index(p.load(INT, blocks, at / form.block_size * 4))
                p.store(block * form.block_size + p.rest(at, form.block_size), slots, 8 * lane)
            # Of no tile later than the first token's last is anything hidden but by its own lanes.
            with p.loop(p.index(0), tokens) as token:
                now = position + token
                low = p.more(now + 1 - window - tile * LANES, p.index(0))
                high = p.less(now + 1 - tile * LANES, p.index(LANES))
                some = p.less(p.more(high - low, p.index(0)), p.index(1))
                with p.loop(p.index(0), some), p.loop(p.index(0), share) as one:
                    query = p.at(q, ((first + token) * heads + head + one) * (form.key_dim * size))
                    keys = p.at(k, key_head * (form.key_dim * kept))
                    score = scores(p, form, query, keys, slots, k_stride * kept)
                    if form.scaled:
                        score = score * vector_scales(p, k_scale, slots, kv_heads, key_head)
                    score = score * scale.splat()
                    if form.capped:
                        score = tanh(p, score * inverse.splat()) * cap.splat()
                    score = p.within(score, low, high, p.vector(HIDDEN))
                    state = p.at(mine, (token * share + one) * record)
                    before = p.load_floats(FLOAT, state, 64 * (form.vectors - 2))
                    total = p.load_floats(FLOAT, state, 64 * (form.vectors - 1))
                    now_largest = p.largest(before, p.maximum(score).splat())
                    fading = exp(p, before - now_largest)
                    weight = p.within(exp(p, score - now_largest), low, high, p.vector(0.0))
                    p.store(now_largest, state, 64 * (form.vectors - 2))
                    p.store(p.fma(total, fading, p.sum(weight).splat()), state, 64 * (form.vectors - 1))
                    if form.scaled:
                        scales = vector_scales(p, v_scale, slots, kv_heads, key_head)
                        weight = p.within(weight * scales, low, high, p.vector(0.0))
                    p.store(weight, weights)
                    values = p.at(v, key_head * (form.value_dim * kept))
                    gather(p, form, state, fading, values, slots, v_stride * kept, weights, low, high)
        with p.loop(p.index(0), tokens) as token, p.loop(p.index(0), share) as one:
            state = p.at(mine, (token * share + one) * record)
            total = p.load_floats(FLOAT, state, 64 * (form.vectors - 1))
            written = p.at(out, ((first + token) * heads + head + one) * (form.value_dim * size))
            for i in range(form.vectors - 2):
                found = p.load_floats(FLOAT, state, 64 * i) / total
                left = form.value_dim - LANES * i
                if left >= LANES:
                    p.store_floats(found, KINDS[form.kind], written, LANES * i * size)
                else:
                    p.store_some(found, KINDS[form.kind], written, LANES * i * size, p.index(left))


def first_tile(p: Program, position: Value, window: Value) -> Value:
    """Of the first token of a task; window: more than any position if there is none."""
    return p.more(position + 1 - window, p.index(0)) / LANES


def scores(p: Program, form: Form, query: Value, keys: Value, slots: Value, stride: Value) -> Value:
    """q k^T of a tile, a key in each lane."""
    places = [p.at(keys, p.load(p.long, slots, 8 * lane) * stride) for lane in range(LANES)]
    totals = [p.vector(0.0)] * LANES
    for i in range(0, form.key_dim, LANES):
        count = min(LANES, form.key_dim - i)
        number = numbers(p, form.kind, query, i, count)
        for lane, place in enumerate(places):
            totals[lane] = p.fma(number, numbers(p, form.stored, place, i, count), totals[lane])
    return sums(p, totals)


def gather(
    p: Program,
    form: Form,
    state: Value,
    fading: Value,
    values: Value,
    slots: Value,
    stride: Value,
    weights: Value,
    low: Value,
    high: Value,
) -> None:
    """Fades what a head has gathered and adds the values of a tile by their weights, some columns at a time."""
    at_once = 8 * LANES
    for begin in range(0, form.value_dim, at_once):
        columns = range(begin, min(begin + at_once, form.value_dim), LANES)
        made = [p.variable(p.load_floats(FLOAT, state, 4 * i) * fading) for i in columns]
        with p.loop(low, high) as lane:
            weight = p.load_splat(FLOAT, weights, lane * 4)
            place = p.at(values, p.load(p.long, slots, lane * 8) * stride)
            for i, total in zip(columns, made, strict=True):
                count = min(LANES, form.value_dim - i)
                total.value = p.fma(weight, numbers(p, form.stored, place, i, count), total.value)
        for i, total in zip(columns, made, strict=True):
            p.store(total.value, state, 4 * i)


def numbers(p: Program, stored: torch.dtype, place: Value, begin: int, count: int) -> Value:
    """16 numbers of a vector, or `count` and zeros."""
    offset = begin * stored.itemsize
    if stored in KINDS:
        if count == LANES:
            return p.load_floats(KINDS[stored], place, offset)
        return p.load_some(KINDS[stored], p.at(place, offset), p.index(count))
    whole = p.load_byte_lanes(p.at(place, offset), count)
    if stored == torch.int8:
        return whole.to_float()
    # e4m3: exponents counted from 7, float32's from 127; without its sign it is a float32 shifted by 20.
    return p.as_floats(((whole & 0x7F) << 20) | ((whole & 0x80) << 24)) * 2.0**120


def vector_scales(p: Program, scales: Value, slots: Value, kv_heads: Value, head: Value) -> Value:
    """bfloat16, of each of a tile's vectors."""
    found = p.vector(0, INT)
    for lane in range(LANES):
        at = (p.load(p.long, slots, 8 * lane) * kv_heads + head) * 2
        found = p.put(found, lane, p.wide_short(p.load(SHORT, scales, at)))
    return p.as_floats(found << 16)
