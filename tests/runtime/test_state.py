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

from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine
from localllm.runtime.state import BlockPool, OutOfBlocks, SequenceState, Snapshot
from tests.tiny import CPU, make_checkpoint, make_engine

TOKENS = st.lists(st.integers(2, 9), min_size=1, max_size=11)


@functools.cache
def checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="localllm-test-"))
    make_checkpoint(folder, "Mistral", sliding_window=13, num_hidden_layers=2)
    return folder


@functools.cache
def oracle() -> Engine:
    return make_engine(checkpoint(), blocks=16, block_size=64)


@functools.cache
def expected(tokens: tuple[int, ...]) -> torch.Tensor:
    return oracle().logits(list(tokens))[-1]


class Verbs(RuleBasedStateMachine):
    """Live sequences are pairs of state and the tokens it should hold."""

    live = Bundle("live")
    snapshots = Bundle("snapshots")

    @initialize(blocks=st.integers(8, 40))
    def start(self, blocks: int) -> None:
        self.engine = make_engine(checkpoint(), blocks=blocks, block_size=4)
        self.pool = self.engine.pool
        self.held: list[SequenceState | Snapshot] = []

    @rule(target=live, prompt=TOKENS)
    def begin(self, prompt: list[int]) -> tuple[SequenceState, list[int]]:
        state = SequenceState(self.pool, prompt)
        self.held.append(state)
        return state, prompt[: state.length]

    @rule(sequence=live, new=TOKENS)
    def extend(self, sequence: tuple[SequenceState, list[int]], new: list[int]) -> None:
        state, tokens = sequence
        if state.length + len(new) > 120:
            return
        try:
            state.extend(len(new))
        except OutOfBlocks:
            return
        tokens += new
        batch = Batch.of([state], [new], [len(new) - 1], CPU, self.pool.drain_copies())
        got = self.engine.runner.launch(batch)[0]
        torch.testing.assert_close(got, expected(tuple(tokens)), atol=1e-4, rtol=1e-4)

    @rule(sequence=live)
    def remember(self, sequence: tuple[SequenceState, list[int]]) -> None:
        state, tokens = sequence
        state.remember(tokens)

    @rule(sequence=live, part=st.floats(0, 1))
    def rollback(self, sequence: tuple[SequenceState, list[int]], part: float) -> None:
        state, tokens = sequence
        state.rollback(int(part * state.length))
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
            self.pool.check()
            for held in self.held:
                held.free()
            self.pool.check_idle()


TestVerbs = pytest.mark.slow(Verbs.TestCase)
TestVerbs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    pool = BlockPool(4, block_size=4)
    first = SequenceState(pool)
    first.extend(6)
    second = first.fork()
    second.extend(1)
    assert pool.copies == [(first.table[1], second.table[1])]
    assert first.table[0] == second.table[0]
    first.extend(1)  # nobody shares its block any more
    assert len(pool.copies) == 1


def test_a_remembered_block_is_found_and_survives_an_undo() -> None:
    pool = BlockPool(8, block_size=4)
    state = SequenceState(pool)
    state.extend(8)
    state.remember([1, 2, 3, 4, 5, 6, 7, 8])
    state.rollback(6)
    state.extend(3)
    other = SequenceState(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert other.length == 8
    assert other.table[0] == state.table[0]
    assert other.table[1] != state.table[1]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pool = BlockPool(8, block_size=4)
    state = SequenceState(pool)
    state.extend(8)
    state.remember([1, 2, 3, 4, 5, 6, 7, 8])
    assert SequenceState(pool, [1, 2, 3, 4, 5, 6, 7, 8]).length == 4


def test_blocks_without_content_are_reused_before_those_others_may_find() -> None:
    pool = BlockPool(3, block_size=2)
    kept = SequenceState(pool)
    kept.extend(4)
    kept.remember([1, 2])
    kept.free()
    fresh = SequenceState(pool)
    fresh.extend(4)
    found = SequenceState(pool, [1, 2, 3])
    assert found.length == 2
    found.free()
    fresh.extend(2)
    with pytest.raises(OutOfBlocks):
        fresh.extend(2)
