"""The scheduler alone: thousands of random traces, with invariants checked after every step."""

import random
from collections.abc import Sequence as ListLike
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.metrics import Stopwatch
from localllm.request import Request, SamplingParams
from localllm.runtime.kv_cache.lower_tier import PrefixLoad
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.scheduler import FIRST_BUDGET_SHARE, MAX_PASSED, Scheduler
from localllm.runtime.sequence import Sequence
from localllm.simulate.tiers import DiskContent, NamedBlockPool, SimulatedDisk, TierSetup

BLOCK = 4


def sequence(prompt: int, answer: int, token: int = 0, priority: int = 0) -> Sequence:
    request = Request((token,) * prompt, SamplingParams(max_tokens=answer), 0.0, priority=priority)
    return Sequence(request, 0, frozenset(), prompt + answer, Stopwatch(0.0))


def run(scheduler: Scheduler, arrivals: dict[int, list[Sequence]], rng: random.Random) -> None:
    """Simulate the engine until all sequences end: every computed sequence gets one token."""
    alive: list[Sequence] = []
    for step in range(20_000):
        new = arrivals.pop(step, [])
        for s in new:
            scheduler.add(s)
        alive += new
        if not alive and not arrivals:
            break
        oldest = min(alive, key=lambda s: s.request.id, default=None)
        before = oldest.computed if oldest else 0
        work = scheduler.schedule()
        check(scheduler, work, alive)
        if oldest and oldest.state and oldest.computed <= before and before:
            pytest.fail("the oldest sequence made no progress")
        for s, count in work:
            s.plan_state_saves(count)
        scheduler.pool.drain_copies()
        for s, _ in work:
            if s.pending == 0:
                s.token_ids.append(rng.randrange(3))
                if s.state:
                    s.state.cache_full_blocks(s.token_ids)
                if len(s.token_ids) >= s.max_len:
                    scheduler.finish(s)
                    alive.remove(s)
    assert not alive
    scheduler.pool.check_all_free()


def check(scheduler: Scheduler, work: list[tuple[Sequence, int]], alive: list[Sequence]) -> None:
    scheduler.pool.check_invariants()
    assert sum(count for _, count in work) <= scheduler.token_budget
    assert all(count > 0 for _, count in work)
    assert bool(work) or not alive
    queued = [*scheduler.running, *scheduler.waiting]
    assert len(queued) == len(set(map(id, queued))) == len(alive)
    assert len({id(s) for s, _ in work}) == len(work)
    assert all(s.state and s in scheduler.running for s, _ in work)
    # What a step writes lies in blocks that nobody else uses or may find.
    for s, count in work:
        written = range((s.computed - count) // BLOCK, -(-s.computed // BLOCK))
        assert s.state and all(scheduler.pool.ref_counts[s.state.block_table[b]] == 1 for b in written)
        assert not any(s.state.block_table[b] in scheduler.pool.key_of for b in written)
    # And in rows of their own.
    if scheduler.pool.recurrent:
        rows = [s.state.state_slot for s, _ in work if s.state]
        assert len(set(rows)) == len(rows)
        assert all(row is not None and scheduler.pool.state_slots.ref_counts[row] == 1 for row in rows)
        assert not any(row in scheduler.pool.state_slots.key_of for row in rows)
    assert len(scheduler.running) <= scheduler.max_running
    tables = [block for s in scheduler.running if s.state for block in s.state.block_table]
    assert set(tables) == {b for b, users in enumerate(scheduler.pool.ref_counts) if users}


@pytest.mark.parametrize("seed", range(300))
def test_every_sequence_finishes_under_any_budget_and_memory(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [
        sequence(rng.randrange(1, 60), rng.randrange(1, 30), rng.randrange(2)) for _ in range(rng.randrange(1, 9))
    ]
    need = max(-(-s.max_len // BLOCK) for s in sequences)
    pool = BlockPool(need + rng.randrange(0, 20), BLOCK, state_slots=rng.choice([0, 1, 2, 5, 30]))
    scheduler = Scheduler(pool, rng.choice([1, 2, 5, 16, 1000]), rng.choice([1, 2, 8]))
    arrivals: dict[int, list[Sequence]] = {}
    for s in sequences:
        arrivals.setdefault(rng.choice([0, 0, 3, 10, 40]), []).append(s)
    ordered = sorted(sequences, key=lambda s: s.request.id)
    for step, ids in zip(
        sorted(arrivals), split(ordered, [len(arrivals[k]) for k in sorted(arrivals)]), strict=True
    ):
        arrivals[step] = ids  # earlier requests arrive first
    run(scheduler, arrivals, rng)


def split(items: list[Sequence], sizes: list[int]) -> list[list[Sequence]]:
    parts, at = [], 0
    for size in sizes:
        parts.append(items[at : at + size])
        at += size
    return parts


def test_a_long_prompt_does_not_delay_short_answers() -> None:
    scheduler = Scheduler(BlockPool(1000, BLOCK), token_budget=16, max_running=8)
    long, short = sequence(1000, 4), sequence(3, 4, token=1)
    scheduler.add(long)
    assert scheduler.schedule() == [(long, 16)]
    scheduler.add(short)
    assert dict(scheduler.schedule()) == {short: 3, long: 13}
    short.token_ids.append(7)
    assert dict(scheduler.schedule()) == {short: 1, long: 15}


def test_a_share_of_the_budget_is_the_oldest_sequences_own() -> None:
    scheduler = Scheduler(BlockPool(1000, BLOCK), token_budget=8, max_running=8)
    oldest = sequence(100, 1)
    scheduler.add(oldest)
    scheduler.schedule()
    for token in range(1, 7):
        scheduler.add(sequence(30, 1, token))
        work = {id(s): count for s, count in scheduler.schedule()}
        assert work[id(oldest)] >= 8 // FIRST_BUDGET_SHARE


def test_a_preempted_sequence_is_not_in_the_step_that_took_its_blocks() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK), token_budget=64, max_running=8)
    first, second = sequence(8, 24), sequence(8, 24, token=1)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.schedule() == [(first, 8), (second, 8)]
    work = []
    while not scheduler.preemptions:
        for s in (first, second):
            s.token_ids.append(5)
        work = scheduler.schedule()
    assert work == [(first, 1)]
    assert scheduler.waiting == [second]
    assert second.state is None


def play(scheduler: Scheduler, sequences: list[Sequence]) -> dict[Sequence, int]:
    """Return the step in which each sequence ends, if all arrive at once."""
    for s in sequences:
        scheduler.add(s)
    done: dict[Sequence, int] = {}
    for step in range(10_000):
        if len(done) == len(sequences):
            break
        for s, _ in scheduler.schedule():
            if s.pending == 0:
                s.token_ids.append(7)
                if len(s.token_ids) >= s.max_len:
                    scheduler.finish(s)
                    done[s] = step
    assert len(done) == len(sequences)
    scheduler.pool.check_all_free()
    return done


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=24),
    st.integers(1, 100),
    st.sampled_from([1, 2, 8, 32]),
)
def test_nothing_is_preempted_when_all_lengths_are_declared(
    lengths: list[tuple[int, int]], budget: int, max_running: int
) -> None:
    """Each uses up to a quarter of the blocks, which are 40 tokens."""
    scheduler = Scheduler(BlockPool(40, BLOCK), budget, max_running)
    play(scheduler, [sequence(prompt, answer, i) for i, (prompt, answer) in enumerate(lengths)])
    assert scheduler.preemptions == 0


class UnreservedScheduler(Scheduler):
    """A scheduler that reserves nothing for future tokens."""

    def reserved_answer_len(self, sequence: Sequence) -> int:
        return 0


@pytest.mark.parametrize("said", [True, False], ids=["lengths are said", "nobody knows them"])
def test_a_reserve_for_answers_spares_putting_back(said: bool) -> None:
    counts: list[int] = []
    for kind in (UnreservedScheduler, Scheduler):
        scheduler = kind(BlockPool(40, BLOCK), 64, max_running=8)
        sequences = [sequence(8, 40, token) for token in range(24)]
        if not said:
            for s in sequences:
                s.request = replace(s.request, params=SamplingParams())
        play(scheduler, sequences)
        counts.append(scheduler.preemptions)
    assert counts[1] == 0 if said else 0 < 2 * counts[1] <= counts[0], counts


def test_an_oversized_request_blocks_no_others() -> None:
    scheduler = Scheduler(BlockPool(100, BLOCK), 64, 8)
    for token in range(3):
        scheduler.add(sequence(4, 10_000, token))
    assert len(scheduler.schedule()) == 3


def test_more_priority_goes_first_and_equals_in_their_order() -> None:
    scheduler = Scheduler(BlockPool(1000, BLOCK), 64, max_running=1)
    sequences = [sequence(4, 2, i, priority) for i, priority in enumerate([0, 5, 0, -1, 5])]
    done = play(scheduler, sequences)
    assert sorted(sequences, key=lambda s: done[s]) == [sequences[i] for i in (1, 4, 0, 2, 3)]


def test_the_lowest_priority_is_preempted() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK), 64, max_running=2)
    first, second = sequence(8, 24, priority=-1), sequence(8, 24, token=1)
    done = play(scheduler, [first, second])
    assert scheduler.preemptions
    assert done[second] < done[first]


def test_a_request_that_does_not_fit_is_overtaken_only_for_a_while() -> None:
    scheduler = Scheduler(BlockPool(20, BLOCK), 64, max_running=8)
    runs, large = sequence(16, 40), sequence(60, 4, 1)
    small = [sequence(4, 8, 2 + i) for i in range(30)]
    done = play(scheduler, [runs, large, *small])
    before = [s for s in small if done[s] < done[runs]]
    assert before
    assert large.passed_count == MAX_PASSED
    assert sum(done[s] < done[large] for s in small) <= MAX_PASSED


def cached_prompts(pool: BlockPool, count: int, blocks: int) -> list[list[int]]:
    """Compute prompts one after another, so that the last ones evict the first ones."""
    prompts = [[number] * blocks * BLOCK for number in range(count)]
    for prompt in prompts:
        state = SequenceState(pool)
        state.extend(len(prompt))
        state.cache_full_blocks(prompt)
        state.free()
    return prompts


def continuing(prompt: list[int], answer: int = 1) -> Sequence:
    """Return a sequence of a prompt and one more token."""
    request = Request((*prompt, 99), SamplingParams(max_tokens=answer), 0.0)
    return Sequence(request, 0, frozenset(), len(prompt) + 1 + answer, Stopwatch(0.0))


def test_nothing_is_copied_from_the_host_for_sequences_that_wait() -> None:
    """Several conversations in the host tier wait for the blocks of a long answer; each is copied back once."""
    pool = BlockPool(20, BLOCK, host_blocks=100)
    prompts = cached_prompts(pool, 6, 10)
    scheduler = Scheduler(pool, token_budget=1000, max_running=8)
    long = sequence(14 * BLOCK, BLOCK, token=50)  # leaves 6 blocks, of which it reserves one for its answer
    scheduler.add(long)
    scheduler.schedule()
    waiting = [continuing(prompt) for prompt in prompts[:4]]
    for each in waiting:
        scheduler.add(each)
    offloaded = pool.offloaded_count
    for _ in range(10):
        assert not scheduler.schedule()
    assert pool.restored_count == 0 and pool.offloaded_count == offloaded
    assert scheduler.waiting == waiting
    scheduler.finish(long)
    for number, each in enumerate(waiting, start=1):  # one fits at a time
        assert scheduler.schedule() == [(each, 1)]
        assert not scheduler.schedule()
        assert pool.restored_count == number * 10
        scheduler.finish(each)
    assert scheduler.host_tokens == 4 * 10 * BLOCK
    pool.check_all_free()


class CountingTier(SimulatedDisk):
    """A disk that has every block and records which loads began."""

    def __init__(self, pool: NamedBlockPool):
        setup = TierSetup(disk_blocks=10**6, disk_bandwidth=1e12, block_bytes=1.0)
        super().__init__(setup, pool, DiskContent(), lambda: self.now)
        self.now = 0.0
        self.begun: list[int] = []

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        self.begun.append(token_ids[0])
        return super().begin_load(token_ids, scope)


def test_a_prefix_is_loaded_once_its_sequence_fits_and_stays_until_it_begins() -> None:
    pool = NamedBlockPool(20, BLOCK)
    disk = CountingTier(pool)
    prompts = cached_prompts(pool, 6, 10)
    disk.now = 1.0  # all are written
    scheduler = Scheduler(pool, token_budget=1000, max_running=8)
    long = sequence(14 * BLOCK, BLOCK, token=50)
    scheduler.add(long)
    scheduler.schedule()
    disk.begun.clear()
    waiting = [continuing(prompt) for prompt in prompts[:4]]
    small = sequence(2 * BLOCK, 1, token=60)
    for each in waiting:
        scheduler.add(each)
    for _ in range(5):
        assert not scheduler.schedule()
    assert not disk.begun
    scheduler.finish(long)
    scheduler.add(small)
    scheduler.schedule()
    assert disk.begun[0] == 0 and small in scheduler.running  # next to the prompt that is being loaded
    scheduler.finish(small)
    for number, each in enumerate(waiting):
        scheduler.schedule()
        assert [token for token in disk.begun if token < 50] == list(range(number + 1))  # and not the next one
        disk.now += 1.0
        disk.install_loaded()
        assert scheduler.schedule() == [(each, 1)]
        scheduler.finish(each)
    assert scheduler.disk_tokens == disk.counts.loaded_tokens == 4 * 10 * BLOCK
    pool.check_all_free()
