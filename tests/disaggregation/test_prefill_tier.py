"""An engine whose prompts others compute answers as if it had computed them, whatever happens to the others."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from localllm.disaggregation import prefill_tier
from localllm.disaggregation.prefill_engine import PrefillEngine
from localllm.disaggregation.prefill_tier import PrefillTier
from localllm.disaggregation.transport import SharedMemory
from localllm.request import TokenLogprob
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.kv_cache.prefix_copy import SEGMENT_BLOCKS
from localllm.runtime.sequence import Sequence
from tests.disaggregation.peers import CONTEXT, PrefillThread, attach, connect, start_prefill_thread
from tests.models.families import FAMILIES
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

QUICK = ("Qwen3", "Qwen3.5")
SIZE = 8  # tokens of a block


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def requests() -> list[Sequence]:
    """Prompts that end within a block, at its end and behind its first token; greedy and seeded."""
    return [
        sequence(prompt_of(205), max_tokens=8, temperature=0.0, logprobs=3),
        sequence(prompt_of(136, 1), seed=5, max_tokens=8, logprobs=3, top_p=0.9),
        sequence(prompt_of(129, 2), seed=6, max_tokens=8, repetition_penalty=1.2, frequency_penalty=0.5),
        sequence(prompt_of(9, 3), seed=7, max_tokens=8),
        sequence([*prompt_of(136, 1), 5, *prompt_of(70, 4)], seed=8, max_tokens=6),  # continues the second
    ]


def answers(engine: Engine) -> list[list[tuple[int | None, TokenLogprob | None]]]:
    return [
        [(event.token_id, event.logprob) for events in run(engine, [each]).values() for event in events]
        for each in requests()
    ]


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_answers_have_the_bits_of_one_engine(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    one, prefill, decode = (make_engine(tmp_path, deterministic=True) for _ in range(3))
    thread = start_prefill_thread(prefill)
    tier = attach(decode, [thread.process])
    expected, got = answers(one), answers(decode)
    assert got == expected
    assert decode.scheduler.cached_tokens == one.scheduler.cached_tokens
    assert prefill.scheduler.prompt_tokens == 204 + 135 + 128 + 206
    assert prefill.scheduler.cached_tokens > 100
    assert tier.move.bytes > 0
    thread.close()
    prefill.pool.check_all_free()


@pytest.fixture
def pair(model: Path) -> Iterator[tuple[Engine, list[PrefillThread]]]:
    """An engine, and two that compute its prompts."""
    threads = [start_prefill_thread(make_engine(model, deterministic=True), number) for number in (1, 2)]
    engine = make_engine(model, deterministic=True)
    attach(engine, [thread.process for thread in threads])
    yield engine, threads
    for thread in threads:
        thread.close()


def test_many_prompts_are_shared_among_processes(model: Path, pair: tuple[Engine, list[PrefillThread]]) -> None:
    engine, threads = pair
    prompts = [prompt_of(120 + i, i) for i in range(12)]
    together = run(engine, [sequence(prompt, seed=1, max_tokens=6) for prompt in prompts])
    alone = make_engine(model, deterministic=True)
    for prompt, answer in zip(prompts, together.values(), strict=True):
        [expected] = run(alone, [sequence(prompt, seed=1, max_tokens=6)]).values()
        assert tokens(answer) == tokens(expected)
    assert all(thread.engine.scheduler.prompt_tokens >= 240 for thread in threads)


def test_the_beginning_of_a_prompt_goes_to_the_process_that_has_it(
    pair: tuple[Engine, list[PrefillThread]],
) -> None:
    engine, threads = pair
    prompt = prompt_of(130)
    for length in (130, 180, 230):
        prompt = [*prompt, *prompt_of(length - len(prompt), length)]
        run(engine, [sequence(prompt, max_tokens=1)])
        engine.pool.reset_prefix_cache()  # so that all of it is wanted again
    computed = [thread.engine.scheduler.prompt_tokens for thread in threads]
    assert min(computed) == 0
    assert max(thread.engine.scheduler.cached_tokens for thread in threads) >= 128 + 176


def test_computed_segments_arrive_before_the_rest_is_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prefill = make_engine(model, deterministic=True), make_engine(model, token_budget=16)
    step, has_arrived = prefill.step, threading.Event()

    def step_after_arrival() -> list[TokenEvent]:
        if any(each.computed >= SIZE * SEGMENT_BLOCKS for each in prefill.scheduler.running):
            assert has_arrived.wait(60)
        return step()

    monkeypatch.setattr(prefill, "step", step_after_arrival)
    thread = start_prefill_thread(prefill)
    tier = attach(engine, [thread.process])
    engine.add_sequence(sequence(prompt_of(200), max_tokens=1))
    deadline, first = time.monotonic() + 60, 0
    while engine.has_unfinished_requests and time.monotonic() < deadline:
        engine.step()
        if tier.move.bytes and not first:
            first = tier.move.bytes
            has_arrived.set()
    assert 0 < first < tier.move.bytes
    thread.close()


def test_few_missing_tokens_of_a_long_prompt_are_computed_here(model: Path) -> None:
    engine, prefill = (make_engine(model) for _ in range(2))
    run(engine, [sequence(prompt_of(200), max_tokens=1)])
    thread = start_prefill_thread(prefill)
    attach(engine, [thread.process])
    run(engine, [sequence([*prompt_of(200), *prompt_of(30, 1)], max_tokens=1)])
    assert prefill.scheduler.prompt_tokens == 0  # it would have computed 224 tokens instead of 24
    thread.close()


def test_prompts_of_a_process_that_ends_are_computed_by_others(
    pair: tuple[Engine, list[PrefillThread]],
) -> None:
    engine, threads = pair
    tier = engine.pool.lower
    assert isinstance(tier, PrefillTier) and tier.process_counts == (2, 2)
    sequences = [sequence(prompt_of(140 + i, i), seed=1, max_tokens=4) for i in range(6)]
    for each in sequences:
        engine.add_sequence(each)
    events = list[TokenEvent](engine.step())
    threads[0].kill()
    deadline = time.monotonic() + 60
    while engine.has_unfinished_requests and time.monotonic() < deadline:
        events += engine.step()
    assert sum(event.finish_reason is not None for event in events) == 6
    assert tier.process_counts == (1, 2)
    threads[1].kill()
    for length in (150, 151):
        assert run(engine, [sequence(prompt_of(length, 9), max_tokens=2)])
    assert tier.process_counts == (0, 2)


def test_cancelled_prompts_leave_nothing_behind(pair: tuple[Engine, list[PrefillThread]]) -> None:
    engine, threads = pair
    sequences = [sequence(prompt_of(200, i), max_tokens=4) for i in range(6)]
    for each in sequences:
        engine.add_sequence(each)
    engine.step()
    for each in sequences:
        engine.cancel(each)
    assert not engine.has_unfinished_requests
    run(engine, [sequence(prompt_of(100, 7), max_tokens=2)])
    wait_for(lambda: not any(thread.engine.has_unfinished_requests for thread in threads))
    for thread in threads:
        thread.close()
        thread.engine.pool.check_all_free()


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_two_engines_that_share_a_process_have_the_bits_of_one(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    one, prefill, *engines = (make_engine(tmp_path, deterministic=True) for _ in range(4))
    expected = answers(one)
    thread = start_prefill_thread(prefill)
    tiers = [attach(engines[0], [thread.process]), attach(engines[1], [thread.connect()])]
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(torch.inference_mode()(answers), engines))
    assert got == [expected, expected]
    assert all(tier.move.bytes > 0 for tier in tiers)
    assert prefill.scheduler.prompt_tokens == 2 * (204 + 135 + 128 + 206)
    for tier in tiers:
        tier.close()
    thread.close()
    prefill.pool.check_all_free()


def test_an_engine_that_ends_leaves_nothing_behind_and_others_go_on(model: Path) -> None:
    prefill, lost, engine = (make_engine(model, deterministic=True) for _ in range(3))
    thread = start_prefill_thread(prefill)
    tiers = [attach(lost, [thread.process]), attach(engine, [thread.connect()])]
    for seed in range(6):
        lost.add_sequence(sequence(prompt_of(200, seed), max_tokens=4))
    lost.step()
    peers = list(thread.prefill.peers)
    tiers[0].close()
    assert run(engine, [sequence(prompt_of(150, 9), max_tokens=2)])
    wait_for(lambda: len(thread.prefill.peers) == 1 and not thread.prefill.prompts)
    [gone] = set(peers) - set(thread.prefill.peers)
    assert not gone.prompts and isinstance(gone.sender, SharedMemory) and gone.sender.memory.closed
    assert tiers[1].move.bytes > 0
    tiers[1].close()
    thread.close()
    prefill.pool.check_all_free()


def test_the_process_with_less_work_for_others_gets_a_prompt(pair: tuple[Engine, list[PrefillThread]]) -> None:
    engine, threads = pair
    first = threads[0].process
    first.receiver = Mock(wraps=first.receiver, reported=100)
    run(engine, [sequence(prompt_of(130), max_tokens=1)])
    assert [thread.engine.scheduler.prompt_tokens for thread in threads] == [0, 129]


def test_each_engine_is_told_what_the_others_have_in_the_queue(model: Path) -> None:
    prefill = PrefillEngine(make_engine(model), CONTEXT)
    processes, channels = zip(*(connect(prefill.engine, prefill, 1) for _ in range(2)), strict=True)
    tiers = [attach(make_engine(model), [process]) for process in processes]
    for tier, lengths in zip(tiers, ((150, 180), (210,)), strict=True):
        for length in lengths:
            tier.begin_load(prompt_of(length, length), "")
    while len(prefill.prompts) < 3:
        prefill.read_inbox()
    prefill.report()
    assert [process.receiver.reported for process in processes] == [209, 149 + 179]
    for tier in tiers:
        tier.close()
    while prefill.peers:
        prefill.read_inbox()
    assert all(channel.connection.fileno() == -1 for channel in channels)


def test_an_engine_with_many_prompts_delays_another_by_a_few(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_tier, "MAX_OUTSTANDING_TOKENS", 300)
    thread = start_prefill_thread(make_engine(model, deterministic=True))
    busy, other = make_engine(model, deterministic=True), make_engine(model, deterministic=True)
    tiers = [attach(busy, [thread.process]), attach(other, [thread.connect()])]
    many = [tiers[0].begin_load(prompt_of(200, seed), "") for seed in range(12)]
    one = tiers[1].begin_load(prompt_of(200, 99), "")
    assert 1 <= len(thread.process.loads) <= 2 and len(tiers[0].queue) >= 10

    def both_advance() -> bool:
        for tier in reversed(tiers):
            tier.install_loaded()
        return one.done

    wait_for(both_advance)
    assert sum(not load.done for load in many) >= 8
    for tier in tiers:
        tier.close()
    thread.close()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
