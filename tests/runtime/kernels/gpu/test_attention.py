"""Attention for GPUs under Triton's interpreter: every form against the reference, with bits that do not depend on
the batch."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from localllm.arch.config import AttentionConfig
from localllm.plan.memory import MAX_RUNNING
from localllm.quant.vectors import INT4, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.attention import attention
from localllm.runtime.kernels.gpu import decode, prefill, splits
from localllm.runtime.kernels.gpu.launch import GPUS, record_launches
from localllm.runtime.kernels.registry import explain
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache
from tests.runtime.kernels.harness import check_on_gpu
from tests.tiny import CPU

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
BLOCKS, SIZE = 48, 16
Spans = list[tuple[int, int]]  # (context, tokens that it brings)
BF16, FP32 = torch.bfloat16, torch.float32
K8V4 = (torch.int8, INT4)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What torch.empty makes is NaN, so that what was not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def step(spans: Spans) -> Batch:
    """Sequences on scattered blocks; what a block table does not use leads out of the cache."""
    pool = BlockPool(BLOCKS, SIZE)
    free = random.Random(0).sample(range(BLOCKS), BLOCKS)
    pool.allocate = lambda after=None: free.pop()  # pyright: ignore[reportAttributeAccessIssue]
    states = [SequenceState(pool) for _ in spans]
    for state, (context, _) in zip(states, spans, strict=True):
        state.extend(context)
    batch = Batch.from_states(states, [[0] * count for _, count in spans], [], CPU)
    table = torch.full((len(spans), batch.block_table.shape[1] + 2), 2**24, dtype=torch.int32)
    for row, state in zip(table, states, strict=True):
        row[: len(state.block_table)] = torch.tensor(state.block_table)
    return replace(batch, block_table=table)


def filled(batch: Batch, c: AttentionConfig, form: KVDtype, spans: Spans, dtype: torch.dtype) -> KVCache:
    """NaN in every slot that is no sequence's."""
    generator = torch.Generator().manual_seed(0)
    rows = BLOCKS * SIZE, c.kv_heads, c.head_dim
    keys, values = (torch.randn(rows, generator=generator).bfloat16() for _ in range(2))
    hidden = torch.ones(len(keys), dtype=torch.bool)
    for i, (context, _) in enumerate(spans):
        hidden[slots(batch, i, 0, context)] = False
    keys[hidden] = values[hidden] = torch.nan
    cache = KVCache(BLOCKS, SIZE, c.kv_heads, c.head_dim, form, CPU)
    cache.append(keys.to(dtype), values.to(dtype), torch.arange(len(keys)))
    return cache


def slots(batch: Batch, sequence: int, begin: int, end: int) -> torch.Tensor:
    positions = torch.arange(begin, end)
    return batch.block_table[sequence].long()[positions // SIZE] * SIZE + positions % SIZE


def queries(spans: Spans, c: AttentionConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(n for _, n in spans), c.heads, c.head_dim, generator=generator).bfloat16()


FEW: Spans = [(1, 1), (70, 3)]
MANY: Spans = [(3, 1), (70, 33)]


@pytest.mark.quick_every(5)
@pytest.mark.parametrize(
    ("spans", "c", "form", "dtype"),
    [
        ([(1, 1), (130, 5)], AttentionConfig(6, 2, 10, None, 0.3), None, FP32),
        (FEW, AttentionConfig(2, 2, 16, None, 0.3, window=1), None, BF16),
        ([(130, 2)], AttentionConfig(8, 1, 64, None, 0.2, window=70, softcap=1.5), None, BF16),
        (FEW, AttentionConfig(3, 1, 8, None, 0.3, window=7, sinks=True), torch.int8, BF16),
        (FEW, AttentionConfig(5, 1, 80, None, 0.1, softcap=2.0), torch.float8_e4m3fn, BF16),
        (FEW, AttentionConfig(3, 1, 10, None, 0.3, sinks=True), torch.float8_e4m3fn, FP32),
        (FEW, AttentionConfig(3, 1, 8, None, 0.3, window=7, sinks=True), INT4, BF16),
        (FEW, AttentionConfig(5, 1, 80, None, 0.1, softcap=2.0), K8V4, BF16),
        (FEW, AttentionConfig(3, 1, 10, None, 0.3), INT4, FP32),
        ([(20, 16)], AttentionConfig(2, 1, 16, None, 0.3, window=9), None, BF16),
        ([(20, 1)], AttentionConfig(40, 1, 16, None, 0.3), None, BF16),
        ([(40, 1)], AttentionConfig(2, 1, 256, None, 0.06), None, BF16),
    ],
    ids=str,
)
def test_few_tokens(spans: Spans, c: AttentionConfig, form: KVDtype | None, dtype: torch.dtype) -> None:
    assert_checked(spans, c, form, dtype, "triton-decode")


@pytest.mark.parametrize(
    ("spans", "c", "form", "dtype"),
    [
        (MANY, AttentionConfig(4, 2, 10, None, 0.3), None, FP32),
        ([(33, 17), (150, 130)], AttentionConfig(3, 1, 16, None, 0.3, window=40, softcap=1.5), None, BF16),
        ([(70, 70)], AttentionConfig(2, 2, 80, None, 0.1), None, BF16),
        ([(70, 20)], AttentionConfig(3, 1, 8, None, 0.3, window=7, sinks=True), torch.int8, BF16),
        (MANY, AttentionConfig(2, 1, 16, None, 0.3, sinks=True), torch.float8_e4m3fn, BF16),
        ([(70, 20)], AttentionConfig(3, 1, 8, None, 0.3, window=7, sinks=True), K8V4, BF16),
        (MANY, AttentionConfig(2, 1, 16, None, 0.3, softcap=1.5), INT4, BF16),
        ([(40, 18)], AttentionConfig(2, 1, 256, None, 0.06), None, BF16),
    ],
    ids=str,
)
def test_many_tokens(spans: Spans, c: AttentionConfig, form: KVDtype | None, dtype: torch.dtype) -> None:
    assert_checked(spans, c, form, dtype, "triton-prefill")


def assert_checked(spans: Spans, c: AttentionConfig, form: KVDtype | None, dtype: torch.dtype, name: str) -> None:
    batch, q = step(spans), queries(spans, c)
    sinks = torch.linspace(-2, 2, c.heads).bfloat16() if c.sinks else None

    def make(d: torch.dtype) -> tuple[object, ...]:
        cache = filled(batch, c, form or d, spans, d)
        return q.to(d), cache, batch, c, None if sinks is None else sinks.to(d)

    terms = c.head_dim if form == INT4 else 1  # codes and offsets of keys are summed apart
    assert check_on_gpu("attention", make, dtype, terms)[0] == name


def attended(
    spans: Spans, c: AttentionConfig, form: KVDtype, only: int | None = None, count: int | None = None
) -> torch.Tensor:
    """Of all sequences, or of one alone with the last `count` tokens that it brings."""
    batch, q = step(spans), queries(spans, c)
    cache = filled(batch, c, form, spans, BF16)
    for i, (context, brought) in enumerate(spans):
        if c.window and context - brought + 1 > c.window:  # what the window hides is not read
            hidden = slots(batch, i, 0, context - brought + 1 - c.window)
            cache.v.view(torch.int8)[hidden] = 0x7F  # NaN
            cache.k.view(torch.int8)[hidden] = 0x7F
            if cache.k_scale is not None and cache.v_scale is not None:
                cache.k_scale[hidden] = cache.v_scale[hidden] = torch.nan
    if only is None:
        return attention(q, cache, batch, c)
    context, brought = spans[only]
    count = brought if count is None else count
    end = sum(n for _, n in spans[: only + 1])
    alone = replace(
        batch,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=batch.context_len[only : only + 1],
        block_table=batch.block_table[only : only + 1],
        max_query_len=count,
        uniform_query_len=count,
        spans=(),
    )
    return attention(q[end - count : end], cache, alone, c)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    ("c", "form"),
    [
        (AttentionConfig(2, 1, 16, None, 0.3), BF16),
        (AttentionConfig(3, 1, 16, None, 0.3, window=66), torch.int8),
        (AttentionConfig(3, 1, 16, None, 0.3, window=66), INT4),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_any_batch_and_as_a_draft(c: AttentionConfig, form: KVDtype) -> None:
    """Also where its neighbours' context is cut into longer chunks, and beside a sequence that brings many."""
    spans = [(5, 1), (258, 4), (90, 1)]  # chunks of one tile up to 256 tokens, then of two
    together = attended(spans, c, form)
    assert torch.equal(together[5:], attended(spans, c, form, only=2))
    for length in (256, 257):
        one = attended([(5, 1), (length, length - 254), (90, 1)], c, form, only=1, count=1)
        assert torch.equal(together[length - 254 : length - 253], one)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(("most_bytes", "expected"), [(1, [1, 16, 3]), (2**26, [20])])
def test_sequences_take_turns_in_a_workspace_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, expected: list[int]
) -> None:
    """It has one row for each token, not for as many tokens of every sequence as one of them brings."""
    c, spans = AttentionConfig(2, 1, 16, None, 0.3), [(5, 1), (40, 20), (90, 16), (30, 2), (20, 1)]
    alone = [attended(spans, c, BF16, only=i) for i in (0, 2, 3, 4)]
    allocate, tokens = splits.SplitWorkspace.allocate, list[int]()

    def noted(q: torch.Tensor, count: int, *sizes: int) -> splits.SplitWorkspace:
        tokens.append(count)
        return allocate(q, count, *sizes)

    monkeypatch.setattr(splits.SplitWorkspace, "allocate", noted)
    monkeypatch.setattr(splits, "MAX_WORKSPACE_BYTES", most_bytes)
    together = attended(spans, c, BF16)
    assert tokens == expected
    assert torch.equal(together[:1], alone[0])
    assert torch.equal(together[21:], torch.cat(alone[1:]))


@pytest.mark.parametrize("spans", [FEW, MANY], ids=str)
def test_no_mask_is_made(spans: Spans) -> None:
    c, batch = AttentionConfig(2, 1, 16, None, 0.3, window=30), step(spans)
    attention(queries(spans, c), filled(batch, c, BF16, spans, BF16), batch, c)
    assert not batch.attention_masks  # so that no plan reserves any


@pytest.mark.parametrize("sequences", [32, MAX_RUNNING["cuda"]])
def test_a_full_step_takes_no_more_workspace_than_planned(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", 1024)
    batch, heads, dim = step([(16, 16)] * sequences), 64, 128
    turns = list(splits.turns(batch, heads, splits.MAX_SPLITS, dim))
    assert sum(turn.tokens for turn in turns) == 16 * sequences
    assert sum(turn.sequences for turn in turns) == sequences
    token_bytes, planned = heads * splits.MAX_SPLITS * (dim + 2) * 4, splits.MAX_WORKSPACE_BYTES
    assert max(turn.tokens for turn in turns) * token_bytes <= planned < 16 * sequences * token_bytes


@pytest.mark.slow
def test_sequences_of_a_full_step_have_the_bits_that_they_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many as run at once, in a workspace for 16 tokens."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", 300)
    monkeypatch.setattr(splits, "MAX_WORKSPACE_BYTES", 1)
    c, spans = AttentionConfig(1, 1, 16, None, 0.3), [(1 + i % 5, 1) for i in range(MAX_RUNNING["cuda"])]
    together = attended(spans, c, BF16)
    for i in (0, 15, 16, 17, 200, 255):
        assert torch.equal(together[i : i + 1], attended(spans, c, BF16, only=i))


def test_a_prompt_has_the_same_bits_in_any_chunks_and_batch() -> None:
    c = AttentionConfig(3, 1, 16, None, 0.3, window=50)
    whole = attended([(90, 90)], c, BF16)
    assert torch.equal(whole[60:], attended([(90, 90)], c, BF16, only=0, count=30))
    assert torch.equal(whole, attended([(90, 90), (20, 1), (33, 19)], c, BF16)[:90])


def test_a_gate_multiplies_the_result_by_its_sigmoid() -> None:
    c = AttentionConfig(2, 1, 16, None, 0.3)
    for kernel, spans in ((decode.attention_decode, [(20, 2)]), (prefill.attention_prefill, [(30, 18)])):
        batch, q = step(spans), queries(spans, c).float()
        cache = filled(batch, c, FP32, spans, FP32)
        gate = torch.randn(len(q), 2, 2, 16, generator=torch.Generator().manual_seed(2))[:, :, 1]
        gated = kernel(q, cache, batch, c, None, gate)
        torch.testing.assert_close(gated, kernel(q, cache, batch, c, None) * gate.sigmoid())


def test_a_row_of_a_bucket_without_a_sequence_changes_nothing() -> None:
    c, spans = AttentionConfig(2, 1, 16, None, 0.3, window=9), [(20, 1), (9, 1)]
    batch, q = step(spans), queries(spans, c)
    cache = filled(batch, c, BF16, spans, BF16)
    two = attention(q, cache, batch, c)
    emptied = replace(batch, context_len=torch.tensor([20, 0], dtype=torch.int32))
    out = attention(q, cache, emptied, c)
    assert torch.equal(out[0], two[0])
    assert not out[1].any()


def test_what_the_kernels_decline() -> None:
    spans = [(9, 1)]
    batch = step(spans)
    odd = AttentionConfig(1, 1, 9, None, 0.3)
    cache = filled(batch, odd, torch.int8, spans, BF16)
    told = dict(explain("attention", queries(spans, odd), cache, batch, odd, None))
    assert told["triton-decode"] == "a quantized cache is read in pairs, but heads have 9 dimensions"
    assert told["triton-prefill"] == "no sequence has more than 16 new tokens"


def test_a_window_is_not_split_among_more_programs_than_it_has_tiles() -> None:
    splits_by_window = {}
    for window in (None, 128, 4096):
        c = AttentionConfig(64, 8, 64, None, 0.1, window=window)
        with record_launches(GPUS[90]) as launches:
            decode.attention_example(c, BF16, 1, 16)()
        splits_by_window[window] = {launch.arguments["SPLITS"] for launch in launches}
    assert splits_by_window == {None: {33}, 128: {4}, 4096: {33}}
