"""What a prefix cache reports of the beginnings that it holds, compared with the blocks that it has."""

import random

import pytest

from localllm.runtime.kv_cache.prefix_journal import PrefixJournal
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState

BLOCK, PIECE = 4, 8  # tokens


def names_of(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:end]) for end in range(PIECE, len(tokens) + 1, PIECE)]


def compute(pool: BlockPool, tokens: list[int]) -> None:
    """Do what an engine does with a prompt, from its admission to its end."""
    state = SequenceState(pool, tokens)
    try:
        state.extend(len(tokens) - state.length)
        state.cache_full_blocks(tokens)
        assert pool.journal
        pool.journal.record(names_of(tokens), state.block_serials)
    finally:
        state.free()


@pytest.mark.parametrize("host_blocks", [0, 12])
def test_what_is_reported_is_what_is_cached(host_blocks: int) -> None:
    evicted_names = 0
    for seed in range(20):
        rng = random.Random(seed)
        pool = BlockPool(24, BLOCK, host_blocks=host_blocks)
        pool.journal = journal = PrefixJournal()
        chats, known, cursors, told = [[0] * PIECE], set(), [0, 0], [set(), set()]
        for _ in range(60):
            tokens = [*rng.choice(chats), *(rng.randrange(3) for _ in range(PIECE * rng.randrange(1, 4)))]
            try:
                compute(pool, tokens)
            except OutOfBlocks:
                continue
            chats.append(tokens)
            known.update(names_of(tokens))
            pool.drain_copies()
            if rng.random() < 0.02:
                pool.reset_prefix_cache()
            held = {name for name in known if len(pool.cached_blocks(name, "")[0]) == len(name) // BLOCK}
            assert set(journal.held) == held
            evicted_names += len(known - held)
            front = rng.randrange(2)  # the fronts are told at times of their own
            cursors[front], more, less = journal.since(cursors[front])
            told[front] = (told[front] | set(more)) - set(less)
            assert told[front] == held
        journal.clear()
        assert not (journal.held or journal.names_of) and told[0] <= set(journal.since(cursors[0]).evicted)
    assert evicted_names > 1000


def test_the_oldest_names_are_given_up_and_reported() -> None:
    journal = PrefixJournal(max_names=4)
    for serial in range(10):
        journal.record([f"a{serial}", f"b{serial}"], [2 * serial, 2 * serial + 1])
        journal.record(["a0"], [0])
    assert len(journal.held) <= 4 and len(journal.changes) <= 8 and len(journal.names_of) <= 4
    assert {"a9", "b9", "a0"} <= journal.held.keys()
    assert journal.since(0).held == [name for name in journal.changes if name in journal.held]


def test_pieces_and_blocks_of_other_lengths() -> None:
    """Names are spread over the part of the blocks that they cover; what is shorter than a block is not held."""
    journal = PrefixJournal()
    journal.record(["a", "b", "c", "d"], [1, 2, 3], share=0.7)
    assert {name: held.end for name, held in journal.held.items()} == {"b": 1, "c": 1, "d": 2}
    journal.dropped(3)
    assert list(journal.held) == ["b", "c", "d"]
    journal.dropped(1)
    assert not journal.held
