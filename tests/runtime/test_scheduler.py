"""The scheduler alone, over counts: thousands of traces, and after every step the same invariants."""

import random

import pytest

from localllm.metrics import Stopwatch
from localllm.request import Request, SamplingParams
from localllm.runtime.scheduler import OLDEST_SHARE, Scheduler
from localllm.runtime.sequence import Sequence
from localllm.runtime.state import BlockPool

BLOCK = 4


def sequence(prompt: int, answer: int, token: int = 0) -> Sequence:
    request = Request((token,) * prompt, SamplingParams(max_tokens=answer), 0.0)
    return Sequence(request, 0, frozenset(), prompt + answer, Stopwatch(0.0))


def run(scheduler: Scheduler, arrivals: dict[int, list[Sequence]], rng: random.Random) -> None:
    """Plays the engine: every computed sequence gets one token, until all are done."""
    alive: list[Sequence] = []
    for step in range(20_000):
        new = arrivals.pop(step, [])
        scheduler.waiting.extend(new)
        alive += new
        if not alive and not arrivals:
            break
        oldest = min(alive, key=lambda s: s.request.id, default=None)
        before = oldest.computed if oldest else 0
        work = scheduler.next_work()
        check(scheduler, work, alive)
        if oldest and oldest.state and oldest.computed <= before and before:
            pytest.fail("the oldest sequence made no progress")
        for s, count in work:
            s.save_state(count)
        scheduler.pool.drain_copies()
        for s, _ in work:
            if s.pending == 0:
                s.token_ids.append(rng.randrange(3))
                if s.state:
                    s.state.remember(s.token_ids)
                if len(s.token_ids) >= s.limit:
                    scheduler.retire(s)
                    alive.remove(s)
    assert not alive
    scheduler.pool.check_idle()


def check(scheduler: Scheduler, work: list[tuple[Sequence, int]], alive: list[Sequence]) -> None:
    scheduler.pool.check()
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
        assert s.state and all(scheduler.pool.users[s.state.table[b]] == 1 for b in written)
        assert not any(s.state.table[b] in scheduler.pool.key_of for b in written)
    # And in rows of their own.
    if scheduler.pool.recurrent:
        rows = [s.state.row for s, _ in work if s.state]
        assert len(set(rows)) == len(rows)
        assert all(row is not None and scheduler.pool.rows.users[row] == 1 for row in rows)
        assert not any(row in scheduler.pool.rows.key_of for row in rows)
    assert len(scheduler.running) <= scheduler.max_running
    tables = [block for s in scheduler.running if s.state for block in s.state.table]
    assert set(tables) == {b for b, users in enumerate(scheduler.pool.users) if users}


@pytest.mark.parametrize("seed", range(300))
def test_every_sequence_is_finished_whatever_the_budget_and_the_memory(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [
        sequence(rng.randrange(1, 60), rng.randrange(1, 30), rng.randrange(2)) for _ in range(rng.randrange(1, 9))
    ]
    need = max(-(-s.limit // BLOCK) for s in sequences)
    pool = BlockPool(need + rng.randrange(0, 20), BLOCK, rows=rng.choice([0, 1, 2, 5, 30]))
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


def test_short_answers_are_not_held_up_by_a_long_prompt() -> None:
    scheduler = Scheduler(BlockPool(1000, BLOCK), token_budget=16, max_running=8)
    long, short = sequence(1000, 4), sequence(3, 4, token=1)
    scheduler.waiting.append(long)
    assert scheduler.next_work() == [(long, 16)]
    scheduler.waiting.append(short)
    assert dict(scheduler.next_work()) == {short: 3, long: 13}
    short.token_ids.append(7)
    assert dict(scheduler.next_work()) == {short: 1, long: 15}


def test_a_share_of_the_budget_is_the_oldest_sequences_own() -> None:
    scheduler = Scheduler(BlockPool(1000, BLOCK), token_budget=8, max_running=8)
    oldest = sequence(100, 1)
    scheduler.waiting.append(oldest)
    scheduler.next_work()
    for token in range(1, 7):
        scheduler.waiting.append(sequence(30, 1, token))
        work = {id(s): count for s, count in scheduler.next_work()}
        assert work[id(oldest)] >= 8 // OLDEST_SHARE


def test_a_preempted_sequence_is_not_in_the_step_that_took_its_blocks() -> None:
    scheduler = Scheduler(BlockPool(4, BLOCK), token_budget=64, max_running=8)
    first, second = sequence(8, 8), sequence(8, 8, token=1)
    scheduler.waiting += [first, second]
    assert scheduler.next_work() == [(first, 8), (second, 8)]
    for s in (first, second):
        s.token_ids.append(5)
    assert scheduler.next_work() == [(first, 1)]
    assert list(scheduler.waiting) == [second]
    assert second.state is None
