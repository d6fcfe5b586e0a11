"""Any interleaving of extend, rollback, snapshot, fork and free leaves logits equal to those of a fresh run over
the same tokens, and leaks no block."""

import functools
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

from localllm.quant.vectors import INT4, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState, Snapshot
from tests.models.families import FAMILIES
from tests.tiny import CPU, make_checkpoint, make_engine

TOKENS = st.lists(st.integers(2, 9), min_size=1, max_size=11)


@functools.cache
def checkpoint(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="localllm-test-"))
    kind, changes = FAMILIES[name]
    make_checkpoint(folder, kind, **changes)
    return folder


@functools.cache
def oracle(name: str, kv_dtype: KVDtype | None) -> Engine:
    return make_engine(checkpoint(name), blocks=16, block_size=64, kv_dtype=kv_dtype)


@functools.cache
def expected(name: str, kv_dtype: KVDtype | None, tokens: tuple[int, ...]) -> torch.Tensor:
    return oracle(name, kv_dtype).logits(list(tokens))[-1]


class Verbs(RuleBasedStateMachine):
    """Pairs of live states and their expected tokens."""

    name = "Mistral, window"
    kv_dtype: KVDtype | None = None
    tolerance = 1e-4
    live = Bundle("live")
    snapshots = Bundle("snapshots")

    @initialize(blocks=st.integers(8, 40), rows=st.integers(1, 12), aside=st.integers(0, 20))
    def start(self, blocks: int, rows: int, aside: int) -> None:
        self.engine = make_engine(
            checkpoint(self.name), blocks=blocks, block_size=4, rows=rows, kv_dtype=self.kv_dtype, aside=aside
        )
        self.pool = self.engine.pool
        self.held: list[SequenceState | Snapshot] = []

    @rule(target=live, prompt=TOKENS)
    def begin(self, prompt: list[int]) -> tuple[SequenceState, list[int]]:
        state = SequenceState(self.pool, prompt)
        self.held.append(state)
        return state, prompt[: state.length]

    @rule(sequence=live, new=TOKENS, saves=st.lists(st.tuples(st.integers(0, 10), st.booleans()), max_size=2))
    def extend(
        self, sequence: tuple[SequenceState, list[int]], new: list[int], saves: list[tuple[int, bool]]
    ) -> None:
        state, tokens = sequence
        if state.length + len(new) > 120:
            return
        try:
            state.extend(len(new))
        except OutOfBlocks:
            return
        for back, rolling in saves:
            if back < len(new):
                state.plan_save(state.length - back, rolling)
        tokens += new
        batch = Batch.from_states([state], [new], [len(new) - 1], CPU, self.pool.drain_copies())
        got = self.engine.runner.launch(batch)[0]
        torch.testing.assert_close(
            got, expected(self.name, self.kv_dtype, tuple(tokens)), atol=self.tolerance, rtol=1e-4
        )

    @rule(sequence=live)
    def remember(self, sequence: tuple[SequenceState, list[int]]) -> None:
        state, tokens = sequence
        state.cache_full_blocks(tokens)

    @rule(sequence=live, part=st.floats(0, 1))
    def rollback(self, sequence: tuple[SequenceState, list[int]], part: float) -> None:
        state, tokens = sequence
        self.cut(state, tokens, int(part * state.length))

    @rule(sequence=live, back=st.integers(1, 5))
    def undo(self, sequence: tuple[SequenceState, list[int]], back: int) -> None:
        state, tokens = sequence
        self.cut(state, tokens, max(0, state.length - back))

    def cut(self, state: SequenceState, tokens: list[int], length: int) -> None:
        state.rollback(length)
        assert state.length <= length if self.pool.recurrent else state.length == length
        del tokens[state.length :]

    @rule(target=live, sequence=live)
    def fork(self, sequence: tuple[SequenceState, list[int]]) -> tuple[SequenceState, list[int]]:
        twin = sequence[0].fork()
        self.held.append(twin)
        return twin, list(sequence[1])

    @rule(target=snapshots, sequence=live)
    def snapshot(self, sequence: tuple[SequenceState, list[int]]) -> tuple[Snapshot, tuple[int, ...]]:
        snapshot = sequence[0].snapshot()
        self.held.append(snapshot)
        return snapshot, tuple(sequence[1])

    @rule(target=live, kept=snapshots)
    def come_back(self, kept: tuple[Snapshot, tuple[int, ...]]) -> tuple[SequenceState, list[int]]:
        state = kept[0].fork()
        self.held.append(state)
        return state, list(kept[1])

    @rule(target=live, sequence=consumes(live))
    def free(self, sequence: tuple[SequenceState, list[int]]) -> object:
        sequence[0].free()
        self.held.remove(sequence[0])
        return multiple()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()
            for held in self.held:
                held.free()
            self.pool.check_all_free()


class VerbsOfDeltaNet(Verbs):
    name = "Qwen3.5"


class VerbsOfShortConv(Verbs):
    name = "LFM2"


class VerbsOf8Bits(Verbs):
    kv_dtype = torch.int8
    tolerance = 0.1  # a number that lies between two steps goes to either of them


class VerbsOf4Bits(Verbs):
    kv_dtype = INT4
    tolerance = 1.5  # the same, with steps that are 17 times as wide


TestVerbs = Verbs.TestCase
TestVerbsOfDeltaNet = pytest.mark.slow(VerbsOfDeltaNet.TestCase)
TestVerbsOfShortConv = pytest.mark.slow(VerbsOfShortConv.TestCase)
TestVerbsOf8Bits = pytest.mark.slow(VerbsOf8Bits.TestCase)
TestVerbs.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=40, deadline=None
)
TestVerbsOfDeltaNet.settings = TestVerbsOfShortConv.settings = TestVerbs.settings
TestVerbsOf4Bits = pytest.mark.slow(VerbsOf4Bits.TestCase)
TestVerbsOf8Bits.settings = TestVerbsOf4Bits.settings = TestVerbs.settings


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    pool = BlockPool(4, block_size=4)
    first = SequenceState(pool)
    first.extend(6)
    second = first.fork()
    second.extend(1)
    assert pool.pending_copies == [(first.block_table[1], second.block_table[1])]
    assert first.block_table[0] == second.block_table[0]
    first.extend(1)  # nobody shares its block any more
    assert len(pool.pending_copies) == 1


def test_a_cached_block_is_reused_and_survives_a_rollback() -> None:
    pool = BlockPool(8, block_size=4)
    state = SequenceState(pool)
    state.extend(8)
    state.cache_full_blocks([1, 2, 3, 4, 5, 6, 7, 8])
    state.rollback(6)
    state.extend(3)
    other = SequenceState(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert other.length == 8
    assert other.block_table[0] == state.block_table[0]
    assert other.block_table[1] != state.block_table[1]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pool = BlockPool(8, block_size=4)
    state = SequenceState(pool)
    state.extend(8)
    state.cache_full_blocks([1, 2, 3, 4, 5, 6, 7, 8])
    assert SequenceState(pool, [1, 2, 3, 4, 5, 6, 7, 8]).length == 4


def test_empty_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3, block_size=2)
    kept = SequenceState(pool)
    kept.extend(4)
    kept.cache_full_blocks([1, 2])
    kept.free()
    fresh = SequenceState(pool)
    fresh.extend(4)
    found = SequenceState(pool, [1, 2, 3])
    assert found.length == 2
    found.free()
    fresh.extend(2)
    with pytest.raises(OutOfBlocks):
        fresh.extend(2)


def recurrent(rows: int) -> BlockPool:
    return BlockPool(16, block_size=4, state_slots=rows)


def test_a_rollback_lands_at_the_newest_saved_state_and_its_row_can_be_written() -> None:
    pool = recurrent(4)
    state = SequenceState(pool)
    state.extend(9)
    for length in (2, 4, 8):
        state.plan_save(length)
    rows = {save.length: save.slot for save in state.state_saves}
    state.rollback(7)
    assert (state.length, state.state_slot, len(state.block_table)) == (4, rows[4], 1)
    state.rollback(3)
    assert (state.length, state.state_slot) == (2, rows[2])
    state.cache_full_blocks([1, 2])
    pool.drain_copies()
    state.extend(1)
    assert state.state_slot == rows[2]  # nobody else needs it any more: not copied
    assert pool.drain_copies().states == ()
    state.rollback(1)
    assert (state.length, state.state_slot) == (0, None)
    pool.check_all_free()


def test_a_prefix_is_reused_up_to_the_last_saved_state() -> None:
    pool = recurrent(4)
    state = SequenceState(pool)
    tokens = list(range(14))
    state.extend(14)
    state.plan_save(8)
    row = state.state_saves[0].slot
    state.cache_full_blocks(tokens)
    other = SequenceState(pool, tokens)
    assert (other.length, other.state_slot) == (8, row)
    pool.drain_copies()
    other.extend(1)
    assert pool.drain_copies().states == ((row, other.state_slot),)
    assert SequenceState(pool, tokens[:8]).length == 0


def test_of_an_answer_only_the_newest_state_stays() -> None:
    pool = recurrent(4)
    state = SequenceState(pool)
    tokens = list(range(17))
    for length, rolling in ((5, False), (9, True), (13, True)):
        state.extend(length - state.length)
        state.plan_save(length - 1, rolling)
        state.cache_full_blocks(tokens[:length])
    state.free()
    kept = []
    for length in (6, 10, 14):
        found = SequenceState(pool, tokens[:length])
        kept.append(found.length)
        found.free()
    assert kept == [4, 4, 12]


def test_saved_states_are_evicted_before_a_sequence_has_to_wait_and_those_in_use_never() -> None:
    pool = recurrent(2)
    first = SequenceState(pool)
    first.extend(5)
    first.plan_save(4)
    first.cache_full_blocks([1, 2, 3, 4, 5])
    found = SequenceState(pool, [1, 2, 3, 4, 5, 6])
    assert found.length == 4
    found.free()
    second = SequenceState(pool)
    second.extend(1)
    assert SequenceState(pool, [1, 2, 3, 4, 5, 6]).length == 0
    assert first.state_slot != second.state_slot
    second.plan_save(1)
    assert not second.state_saves  # every row is in use
    with pytest.raises(OutOfBlocks):
        SequenceState(pool).extend(1)


def test_a_fork_shares_the_state_until_one_side_extends() -> None:
    pool = recurrent(2)
    first = SequenceState(pool)
    first.extend(3)
    pool.drain_copies()
    twin = first.fork()
    assert twin.state_slot == first.state_slot
    twin.extend(1)
    assert pool.drain_copies().states == ((first.state_slot, twin.state_slot),)
    twin.free()
    first.free()
    pool.check_all_free()
