"""Stages that compute several steps at a time give each sequence the tokens of one process, whatever is preempted,
cancelled or drafted meanwhile, and both stages really are busy at once.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localllm.errors import LocalLLMError
from localllm.request import FinishReason, TokenLogprob
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.scheduler import Scheduler
from localllm.runtime.sequence import Sequence
from tests.models.families import FAMILIES
from tests.models.proofs import token_ids
from tests.parallel.ranks_in_threads import RanksInThreads
from tests.runtime.test_engine import MistakenDrafter, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

VOCABULARY = 320
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0, "min_tokens": 1},
]


class Remainders:
    """A grammar: the remainder by 3 of each token is that of its position in the answer; ends after 15 tokens."""

    cut, fault = False, None

    def __init__(self) -> None:
        self.length = 0

    @property
    def finished(self) -> bool:
        return self.length == 15

    def begin(self, drafts: ListLike[int]) -> Callable[[], list[NDArray[np.int32] | None]]:
        assert self.allowed(drafts) == list(drafts)
        first = self.length

        def masks() -> list[NDArray[np.int32] | None]:
            assert self.length == first  # nothing is read between the launch of a step and its sampling
            rows = []
            for position in range(first, first + 1 + len(drafts)):
                bits = np.arange(VOCABULARY) % 3 == position % 3
                rows.append(np.packbits(bits, bitorder="little").view(np.int32))
            return rows

        return masks

    def advance(self, token_id: int) -> None:
        assert self.allowed([token_id])
        self.length += 1

    def forced(self, most: int) -> list[int]:
        return []

    def allowed(self, drafts: ListLike[int]) -> list[int]:
        fits = [draft % 3 == position % 3 for position, draft in enumerate(drafts, self.length)]
        return list(drafts)[: [*fits, False].index(False)]


class GrammaticalDrafter(MistakenDrafter):
    def draft(self, sequences: list[Sequence]) -> None:
        assert not any(s.awaits_token for s in sequences)
        super().draft(sequences)
        for s in sequences:
            if s.constraint:
                s.draft_ids = s.constraint.allowed(s.draft_ids)


def run(
    engine: Engine, sequences: list[Sequence], between: Callable[[int], list[TokenEvent]] = lambda step: []
) -> dict[int, list[TokenEvent]]:
    events = {s.request.id: list[TokenEvent]() for s in sequences}
    for s in sequences:
        engine.add_sequence(s)
    for step in range(5000):
        if not engine.has_unfinished_requests:
            break
        for event in between(step) + engine.step():
            events[event.sequence.request.id].append(event)
    assert not engine.has_unfinished_requests
    engine.pool.check_all_free()
    assert len(engine.free_token_slots) == len(engine.runner.newest_tokens)
    return events


def logprobs(answer: list[TokenEvent]) -> list[TokenLogprob | None]:
    return [event.logprob for event in answer if event.token_id is not None]


def fill_with_nan(ranks: RanksInThreads) -> None:
    """So that a read of an element that is not written, or no more valid, shows."""
    for runner in ranks.runners:
        for cache in runner.caches:
            for tensor in vars(cache).values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.fill_(torch.nan)


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3.5", "LFM2", "DeepSeek-V3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes)
    return path


@pytest.mark.quick_every(17)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(16))
def test_any_mix_gives_the_tokens_of_one_process(folder: Path, seed: int, stages: int) -> None:
    """Of up to three groups, with few blocks; a stage begins a step at once, or as late as possible."""
    rng = random.Random(seed)
    groups, deterministic = rng.randrange(2, stages + 1), seed % 4 == 3
    base = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 30))]
    prompts = [
        base[: rng.randrange(len(base) + 1)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 25))]
        for _ in range(rng.randrange(2, 9))
    ]
    settings = [
        rng.choice(SAMPLING) | {"max_tokens": rng.randrange(1, 20), "logprobs": 1 if deterministic else None}
        for _ in prompts
    ]
    grammatical = [rng.random() < 0.3 for _ in prompts]
    eos = frozenset(rng.sample(range(VOCABULARY), 8))

    def fresh() -> list[Sequence]:
        made = [sequence(p, seed, eos, **s) for p, s in zip(prompts, settings, strict=True)]
        for s, follows in zip(made, grammatical, strict=True):
            s.constraint = Remainders() if follows else None
        return made

    roomy = make_engine(folder, deterministic=deterministic)
    expected = [run(roomy, [s])[s.request.id] for s in fresh()]
    known = [tokens(answer) for answer in expected]
    together = [replace_priority(s, rng.choice([0, 0, 1])) for s in fresh()]
    drafter = GrammaticalDrafter(rng, {s.request.id: said for s, said in zip(together, known, strict=True)})
    need = max(-(-s.max_len // 8) for s in together)
    ranks = RanksInThreads(
        folder,
        1,
        shares=(1.0,) * stages,
        concurrent_steps=groups,
        drafter=drafter if seed % 2 else None,
        blocks=need + rng.randrange(0, 12),
        rows=rng.randrange(1, 12),
        token_budget=rng.choice([1, 3, 8, 40, 512]),
        max_running=rng.choice([1, 3, 16]),
        deterministic=deterministic,
    )
    fill_with_nan(ranks)
    if rng.random() < 0.5:
        begin_late(ranks, stages)
    cancelled = set(rng.sample(range(len(together)), rng.choice([0, 0, 1, 2])))
    preemptions = rng.choice([0, 0.05, 0.2])
    preempted_at, engine, most_in_flight = rng.randrange(60), ranks.engine, 0

    def between(step: int) -> list[TokenEvent]:
        nonlocal most_in_flight
        most_in_flight = max(most_in_flight, len(engine.in_flight))
        for index in cancelled:
            if rng.random() < 0.1:
                engine.cancel(together[index])
        if engine.scheduler.running and rng.random() < preemptions:  # also one whose step is under way
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        return engine.preempt_all() if step == preempted_at else []

    with torch.inference_mode(), ranks:
        got = run(engine, together, between)
    assert most_in_flight < groups
    for index, s in enumerate(together):
        answer = got[s.request.id]
        said = tokens(answer)
        assert said == known[index][: len(said)]
        if index not in cancelled:
            assert len(said) == len(known[index])
            assert answer[-1].finish_reason == expected[index][-1].finish_reason != FinishReason.ERROR
            told = [p.token_id for e in answer for p in e.prompt_logprobs]
            assert told == (list(s.request.prompt_ids[1:]) if s.needs_whole_prompt else [])
        if deterministic:
            assert logprobs(answer) == logprobs(expected[index])[: len(said)]


def replace_priority(s: Sequence, priority: int) -> Sequence:
    s.request = replace(s.request, priority=priority)
    return s


def begin_late(ranks: RanksInThreads, stages: int) -> None:
    """Let other stages begin a step only when rank 0 waits for the results of one."""
    wanted = [threading.Semaphore(0) for _ in range(stages)]

    def want() -> None:
        for each in wanted:
            each.release()

    ranks.ranks[0].on_wait = want
    ranks.before_step = lambda rank: wanted[rank].acquire(timeout=30)


def two_stages(path: Path, **options: Any) -> RanksInThreads:
    return RanksInThreads(path, 1, shares=(1.0, 1.0), concurrent_steps=2, **options)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "Qwen3")
    return tmp_path


def shapes_of(ranks: RanksInThreads) -> list[list[int]]:
    """Return a list to which the token counts of each step are added as it is launched."""
    shapes, run_step = list[list[int]](), ranks.engine.runner.run

    def noted(step: Any) -> Any:
        shapes.append(step.token_counts)
        return run_step(step)

    ranks.engine.runner.run = noted
    return shapes


def meet(ranks: RanksInThreads, first: int, last: int) -> None:
    """Have the first stage meet the second one, in every step from `first` to `last`, while that computes the step
    before. A stage that waits for the other one's result ends the test."""
    barrier = threading.Barrier(2, timeout=20)
    for runner, range_of_steps in zip(
        ranks.runners, (range(first, last + 1), range(first - 1, last)), strict=True
    ):

        def compute(
            *arguments: Any, compute: Any = runner.compute, own: range = range_of_steps, number: Any
        ) -> Any:
            if next(number) in own:
                barrier.wait()
            return compute(*arguments)

        numbers = iter(range(10_000))
        runner.compute = lambda *a, compute=compute, numbers=numbers: compute(*a, number=numbers)


def test_two_answers_keep_both_stages_busy(qwen: Path) -> None:
    asked = [sequence([5, 6, 7, n], temperature=0, max_tokens=8) for n in (8, 9)]
    with torch.inference_mode(), two_stages(qwen) as ranks:
        shapes = shapes_of(ranks)
        meet(ranks, 2, 14)
        run(ranks.engine, asked)
    assert shapes == [[4, 4], *[[1]] * 14]


def test_chunks_of_a_prompt_follow_each_other(qwen: Path) -> None:
    asked = sequence(token_ids(70), temperature=0, max_tokens=1)
    with torch.inference_mode(), two_stages(qwen, token_budget=10) as ranks:
        shapes = shapes_of(ranks)
        meet(ranks, 1, 6)
        got = run(ranks.engine, [asked])
    assert shapes == [[10]] * 7
    alone = sequence(token_ids(70), temperature=0, max_tokens=1)
    assert tokens(got[asked.request.id]) == tokens(run(make_engine(qwen), [alone])[alone.request.id])


def test_answers_are_shared_out_evenly_and_none_waits(qwen: Path) -> None:
    """Of five, three and two are in a step by turns."""
    asked = [sequence([5, 6, 7, n], temperature=0, max_tokens=9) for n in range(5)]
    with torch.inference_mode(), two_stages(qwen) as ranks:
        shapes = shapes_of(ranks)
        run(ranks.engine, asked)
    assert [len(shape) for shape in shapes] == [5, *[3, 2] * 8]


def test_one_stream_has_one_step_in_flight(qwen: Path) -> None:
    with torch.inference_mode(), two_stages(qwen) as ranks:
        shapes = shapes_of(ranks)
        run(ranks.engine, [sequence([5, 6, 7], temperature=0, max_tokens=9)])
        assert shapes == [[3], *[[1]] * 8]
        assert ranks.engine.steps == 9


def test_logits_are_computed_beside_steps_in_flight(qwen: Path) -> None:
    asked = [sequence(token_ids(9 + n), temperature=0, max_tokens=12) for n in range(3)]
    expected = make_engine(qwen).logits(token_ids(20))
    with torch.inference_mode(), two_stages(qwen) as ranks:
        got, in_flight = list[torch.Tensor](), list[int]()

        def between(step: int) -> list[TokenEvent]:
            in_flight.append(len(ranks.engine.in_flight))
            got.append(ranks.engine.logits(token_ids(20)))
            return []

        answers = run(ranks.engine, asked, between)
    assert max(in_flight) == 1
    assert all(torch.equal(each, expected) for each in got)
    alone = [sequence(token_ids(9 + n), temperature=0, max_tokens=12) for n in range(3)]
    engine = make_engine(qwen)
    for s, other in zip(asked, alone, strict=True):
        assert tokens(answers[s.request.id]) == tokens(run(engine, [other])[other.request.id])


def test_results_of_forgotten_steps_reach_no_other_sequence(qwen: Path) -> None:
    """A step fails while another is under way, as by an error of sampling: the engine remains usable."""
    prompts = [token_ids(9 + n) for n in range(3)]
    engine = make_engine(qwen)
    expected = []
    for prompt in prompts:
        alone = sequence(prompt, temperature=0, max_tokens=12)
        expected.append(tokens(run(engine, [alone])[alone.request.id]))
    with torch.inference_mode(), two_stages(qwen) as ranks:
        failing = [sequence([3, n], temperature=0, max_tokens=30) for n in range(3)]
        for s in failing:
            ranks.engine.add_sequence(s)
        for _ in range(6):
            ranks.engine.step()
        assert ranks.engine.in_flight
        sample = ranks.engine.runner.sample

        def fail(*arguments: Any) -> Any:
            raise LocalLLMError("sampling failed", "")

        ranks.engine.runner.sample = fail
        with pytest.raises(LocalLLMError, match="sampling failed"):
            for _ in range(2):
                ranks.engine.step()
        ranks.engine.runner.sample = sample
        for s in failing:
            ranks.engine.cancel(s)
        ranks.engine.reset()
        assert ranks.engine.runner.pending_steps
        asked = [sequence(prompt, temperature=0, max_tokens=12) for prompt in prompts]
        got = run(ranks.engine, asked)
    assert [tokens(got[s.request.id]) for s in asked] == expected


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_waits_for_more_steps_than_run_at_a_time(seed: int) -> None:
    """While answers begin and end, and prompts of any length are computed beside them."""
    rng = random.Random(seed)
    concurrent = rng.randrange(2, 5)
    scheduler = Scheduler(BlockPool(2000, 8), 64, 16, concurrent_steps=concurrent)
    in_flight, waited, most = deque[list[Sequence]](), Counter[Sequence](), 0
    for step in range(300):
        if rng.random() < 0.2:
            prompt = [1] * rng.choice([1, 5, 200])
            scheduler.add(sequence(prompt, max_tokens=rng.randrange(1, 40)))
        before = sum(s.pending <= 1 for s in scheduler.running)
        scheduler.choose_group()
        ready = [s for s in scheduler.running if s.pending == 1]
        work = scheduler.schedule()
        group = [s for s, _ in work if s in ready]
        assert len(group) <= -(-before // concurrent)
        assert not any(s.awaits_token for s, _ in work)
        for s in ready:
            waited[s] = 0 if s in group else waited[s] + 1
        most = max(most, *waited.values(), 0)
        sampling = [s for s, _ in work if not s.pending]
        for s in sampling:
            s.awaits_token = True
        if work:
            in_flight.append(sampling)
        if in_flight and (not work or len(in_flight) == concurrent):
            for s in in_flight.popleft():
                s.awaits_token = False
                s.token_ids.append(step)
                if len(s.token_ids) == s.max_len:
                    scheduler.finish(s)
                    del waited[s]
    assert most < concurrent


def test_durations_are_of_rounds_in_which_each_answer_gets_a_token(qwen: Path) -> None:
    asked = [sequence([5, 6, 7, n], temperature=0, max_tokens=9) for n in range(5)]
    with torch.inference_mode(), two_stages(qwen) as ranks:
        engine, shapes = ranks.engine, []

        def between(step: int) -> list[TokenEvent]:
            shapes.append(engine.last_shape)
            return []

        run(engine, asked, between)
        shapes.append(engine.last_shape)
    prompts, *rounds = [shape for shape in shapes if shape]
    assert (prompts.prompts, prompts.prompt_tokens) == (5, 20)
    assert [(shape.sequences, shape.tokens, shape.context) for shape in rounds] == [
        (5, 5, 5 * length) for length in range(5, 13)
    ]
