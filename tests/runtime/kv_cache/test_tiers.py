"""Blocks keep their contents when they move between the tiers."""

import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from localllm.runtime.kv_cache.blocks import OutOfBlocks
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tiers import TieredBlockAllocator, merge_copies
from tests.models.families import FAMILIES
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

SIZE = 3
COPIES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)


@given(COPIES)
def test_batched_copies_equal_single_copies(copies: list[tuple[int, int]]) -> None:
    wanted = list(range(10))
    for source, target in copies:
        wanted[target] = wanted[source]
    got = list(range(10))
    for source, target, length in merge_copies(copies):
        got[target : target + length] = got[source : source + length]
    assert got == wanted


def test_neighbours_that_take_turns_are_two_runs() -> None:
    turns = [copy for i in range(50) for copy in ((i, 100 + i), (200 + i, i))]
    assert merge_copies(turns) == ((0, 100, 50), (200, 0, 50))
    assert merge_copies([(i, i + 1) for i in range(3)]) == ((0, 1, 1), (1, 2, 1), (2, 3, 1))


class Memory:
    """Simulates the memory of the device and the host: each slot stores all tokens up to its own, since keys and
    values depend on them.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.blocks: list[list[tuple[int, ...] | None]] = [[None] * SIZE for _ in pool.ref_counts]

    def step(self, state: SequenceState, known: list[int], new: list[int]) -> None:
        for source, target, length in self.pool.drain_copies().blocks:
            moved = [list(block) for block in self.blocks[source : source + length]]
            self.blocks[target : target + length] = moved
        for i in range(len(known), len(known) + len(new)):
            self.blocks[state.block_table[i // SIZE]][i % SIZE] = (*known, *new)[: i + 1]

    def check(self, state: SequenceState, known: list[int]) -> None:
        for i in range(state.length):
            assert self.blocks[state.block_table[i // SIZE]][i % SIZE] == tuple(known[: i + 1])


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(4, 12), st.integers(0, 12))
def test_blocks_hold_what_was_computed(rng: random.Random, blocks: int, aside: int) -> None:
    pool = BlockPool(blocks, SIZE, host_blocks=aside)
    memory = Memory(pool)
    live: list[tuple[SequenceState, list[int]]] = []
    texts = [[rng.randrange(2) for _ in range(30)] for _ in range(3)]
    for _ in range(60):
        verb = rng.choice(("begin", "extend", "extend", "remember", "rollback", "fork", "free"))
        if verb == "begin":
            text = rng.choice(texts)
            state = SequenceState(pool, text)
            assert state.length < len(text) and all(block < blocks for block in state.block_table)
            live.append((state, text[: state.length]))
        elif live:
            state, known = rng.choice(live)
            if verb == "extend":
                text = rng.choice(texts)
                follows = text[len(known) :] if text[: len(known)] == known else [9] * 5
                new = follows[: rng.randrange(1, 8)]
                try:
                    state.extend(len(new))
                except OutOfBlocks:
                    continue
                memory.step(state, known, new)
                known += new
                memory.check(state, known)  # what was found and what was copied, too
            elif verb == "remember":
                state.cache_full_blocks(known)
            elif verb == "rollback":
                state.rollback(rng.randrange(state.length + 1))
                del known[state.length :]
            elif verb == "fork":
                live.append((state.fork(), list(known)))
            else:
                state.free()
                live.remove((state, known))
        pool.check_invariants()
    memory.step(SequenceState(pool), [], [])
    for state, known in live:
        memory.check(state, known)
        state.free()
    pool.check_all_free()


def test_an_evicted_conversation_is_restored() -> None:
    pool = BlockPool(4, SIZE, host_blocks=4)
    first = SequenceState(pool)
    first.extend(10)
    first.cache_full_blocks(list(range(10)))
    first.free()
    second = SequenceState(pool)
    second.extend(12)
    second.cache_full_blocks(list(range(50, 62)))
    second.free()
    pool.drain_copies()
    again = SequenceState(pool, list(range(12)))
    assert again.length == 9
    copies = pool.drain_copies().blocks
    assert sum(run.length for run in copies if run.target >= 4) == 3  # of the second, which makes room
    assert sum(run.length for run in copies if run.source >= 4) == 3
    beginning = SequenceState(pool, list(range(50, 63)))  # all is in use but one
    assert beginning.length == SIZE
    beginning.free()
    again.free()
    assert SequenceState(pool, list(range(50, 63))).length == 12


def test_the_oldest_content_aside_is_lost_first() -> None:
    pool = BlockPool(1, SIZE, host_blocks=2)
    for word in range(4):
        state = SequenceState(pool)
        state.extend(SIZE)
        state.cache_full_blocks([word] * SIZE)
        state.free()
    found = [bool(pool.find_longest_prefix([word] * (SIZE + 1))[0]) for word in range(4)]
    assert found == [False, True, True, True]


def test_recomputed_blocks_stay_on_the_device() -> None:
    pool = BlockPool(2, SIZE, host_blocks=2)
    for word in (1, 2, 3, 1):
        state = SequenceState(pool)
        state.extend(SIZE)
        state.cache_full_blocks([word] * SIZE)
        state.free()
    pool.drain_copies()
    assert SequenceState(pool, [1] * (SIZE + 1)).length == SIZE
    assert pool.drain_copies().blocks == ()
    pool.check_invariants()


def test_a_failed_step_caches_nothing() -> None:
    pool = BlockPool(2, SIZE, state_slots=2, host_blocks=2)
    for word in (1, 2, 3):
        state = SequenceState(pool)
        state.extend(SIZE)
        state.plan_save(SIZE)
        state.cache_full_blocks([word] * SIZE)
        state.free()
    pool.reset_prefix_cache()
    assert [SequenceState(pool, [word] * 4).length for word in (1, 2, 3)] == [0, 0, 0]
    assert pool.drain_copies() == ((), ())
    pool.check_all_free()


def test_without_a_host_tier_there_is_one_tier() -> None:
    tiers = TieredBlockAllocator[str](1)
    tiers.add_to_index(tiers.allocate(), "a")
    tiers.release(0)
    assert tiers.cached == {"a": 0}
    tiers.allocate()
    assert tiers.cached == {} and tiers.pending_copies == []


@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek-V3", "Qwen3.5"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
def test_a_second_turn_hits_the_host_tier(tmp_path: Path, family: str, asynchronous: bool) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    roomy, small = make_engine(tmp_path), make_engine(tmp_path, blocks=9, aside=16)
    small.runner.asynchronous = asynchronous
    prompts = [list(range(3, 45)), list(range(145, 195))]
    said = []
    for engine in (roomy, small):
        texts = [list(prompt) for prompt in prompts]
        cached = []
        for turn in (0, 1, 0, 1, 0):
            asked = sequence(texts[turn], temperature=0, max_tokens=6)
            texts[turn] += [*tokens(run(engine, [asked])[asked.request.id]), 7]
            cached.append(asked.cached_tokens)
        said.append((texts, cached))
    (texts, cached), (again, found) = said
    assert texts == again
    # A step that is under way already has computed an answer's last token, which may fill a block.
    assert all(0 <= more - count <= 8 * asynchronous for count, more in zip(cached, found, strict=True))
    assert found[2] >= 40
