"""The product's engine on a clock, with a runner that returns chosen tokens, to compare a simulated one with."""

import math
import random
from dataclasses import dataclass, field

import torch

from localllm.metrics import Stopwatch
from localllm.request import Request, SamplingParams
from localllm.runtime.engine import Engine, step_shape
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.scheduler import ScheduledTokens
from localllm.runtime.sequence import Sequence
from localllm.runtime.step import Readback, Step, StepOutput, StepShape
from localllm.simulate.engine import Clock, SimulatedDrafter
from localllm.simulate.load import LoadPlan, Turn
from localllm.simulate.simulation import EngineSetup

END, WRONG = 0, 1
CPU = torch.device("cpu")


class LinearCost:
    """Durations that grow with everything a shape has."""

    source = "made up"

    def totals(self) -> None:
        return None

    def __init__(self, jitter: bool = False):
        draws = random.Random(1)
        self.factors = [draws.lognormvariate(0, 0.4) if jitter else 1.0 for _ in range(257)]

    def seconds(self, shape: StepShape, number: int) -> float:
        decoding = 2e-5 * shape.sequences + 3e-6 * shape.tokens + 1e-7 * shape.context
        prompts = 3e-4 * shape.prompts + 1e-4 * shape.prompt_tokens + 1e-8 * (shape.pairs + shape.prompt_context)
        return (1e-3 + decoding + prompts) * self.factors[number % len(self.factors)]


def token(span: int, index: int) -> int:
    """Return the token at an index of a text; tokens of different texts differ."""
    return 2 + hash((span, index)) % (2**60)


class TimedReadback(Readback):
    def __init__(self, values: torch.Tensor, clock: Clock, ends_at: float):
        super().__init__(values)
        self.clock, self.ends_at = clock, ends_at

    def wait(self) -> tuple[torch.Tensor | None, ...]:
        self.clock.now = max(self.clock.now, self.ends_at)
        return super().wait()


@dataclass
class ChosenTokens:
    """A runner that returns the tokens of each sequence's answer, and takes the time that a cost says."""

    clock: Clock
    cost: LinearCost
    asynchronous: bool
    max_running: int
    concurrent_steps = 1
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)  # by seed: prompt and answer lengths
    device: torch.device = CPU
    model: None = None
    shape: StepShape | None = None  # of the next step
    number: int = 0
    free_at: float = 0.0

    def samples_on_device(self, params: SamplingParams, end_tokens: int) -> bool:
        return True

    def run(self, step: Step) -> StepOutput:
        assert self.shape
        self.free_at = max(self.clock.now, self.free_at) + self.cost.seconds(self.shape, self.number)
        self.number += 1
        chosen = [self.choose(spec.seed, spec.position) for spec in step.sampling_specs]
        values = torch.tensor(chosen, dtype=torch.int64)
        return StepOutput(TimedReadback(values, self.clock, self.free_at), None)

    def choose(self, answer_id: int, position: int) -> int:
        prompt_len, answer_len = self.answers[answer_id]
        index = position - prompt_len
        return END if index == answer_len - 1 else token(answer_id, index)


class RecordingEngine(Engine):
    """The product's engine, which records the scheduled tokens of each step."""

    schedule_log: list[list[tuple[int, int]]]

    def launch(self, work: ScheduledTokens):
        self.runner.shape = step_shape(work)  # type: ignore[attr-defined]
        self.schedule_log.append([(s.request.id, count) for s, count in work])
        return super().launch(work)


class ChosenDrafter(SimulatedDrafter):
    """Drafts as many right tokens as are to be accepted, and wrong ones behind them."""

    answers: dict[int, tuple[int, int]]

    def draft(self, sequences: list[Sequence]) -> None:
        super().draft(sequences)
        for sequence in sequences:
            prompt_len, answer_len = self.answers[sequence.seed]
            produced = len(sequence.token_ids) - prompt_len
            right = self.accepted_count(sequence.request.id, produced)
            for i in range(len(sequence.draft_ids)):
                index = produced + i
                expected = END if index == answer_len - 1 else token(sequence.seed, index)
                sequence.draft_ids[i] = expected if i < right else WRONG


@dataclass
class RealRun:
    """What the product's engine did."""

    steps: list[list[tuple[int, int]]]
    first: dict[int, float]  # by request
    last: dict[int, float]
    cached: dict[int, int]
    preemptions: int


def run_product(plan: LoadPlan, setup: EngineSetup, cost: LinearCost) -> RealRun:
    """Run a load on the product's engine, with the loop of its worker."""
    clock, load = Clock(), plan.start()
    runner = ChosenTokens(clock, cost, setup.asynchronous, setup.max_running)
    drafter = ChosenDrafter(setup.drafts, setup.acceptance, setup.seed) if setup.drafts else None
    if drafter:
        drafter.answers = runner.answers
    pool = BlockPool(setup.blocks, setup.block_size, setup.state_slots, setup.tiers.host_blocks)
    engine = RecordingEngine(runner, pool, setup.token_budget, setup.max_running, drafter, clock)  # type: ignore[arg-type]
    engine.schedule_log = []
    turns: dict[int, Turn] = {}
    run = RealRun(engine.schedule_log, {}, {}, {}, 0)
    number, capacity = 0, setup.capacity
    while True:
        while load.next_at() <= clock.now:
            number += 1
            turn = turns[number] = load.pop()
            if turn.prompt_len >= capacity:
                load.answered(turn, turn.arrival)  # at once, whatever the engine does
                continue
            engine.add_sequence(make_real(turn, number, capacity, setup, clock, runner, turns))
        if not engine.has_unfinished_requests:
            if load.next_at() == math.inf:
                break
            clock.now = max(clock.now, load.next_at())
            continue
        for event in engine.step():
            if event.token_id is not None:
                run.first.setdefault(event.sequence.request.id, clock.now)
                run.last[event.sequence.request.id] = clock.now
            if event.finish_reason:
                run.cached[event.sequence.request.id] = event.sequence.cached_tokens or 0
                load.answered(turns[event.sequence.request.id], clock.now)
    pool.check_all_free()
    run.preemptions = engine.scheduler.preemptions
    return run


def make_real(
    turn: Turn,
    number: int,
    capacity: int,
    setup: EngineSetup,
    clock: Clock,
    runner: ChosenTokens,
    turns: dict[int, Turn],
) -> Sequence:
    """Return a sequence with the tokens of a turn; answers of earlier turns end with the end token."""
    answer_lengths = {each.answer_id: each.answer_len for each in turns.values()}
    ids: list[int] = []
    for span, length in turn.prompt:
        ends = answer_lengths.get(span)
        ids += [END if ends == i + 1 else token(span, i) for i in range(length)]
    answer_len = min(turn.answer_len, capacity - len(ids))
    runner.answers[turn.answer_id] = len(ids), answer_len
    limit = answer_len if setup.max_answer is None else max(answer_len, setup.max_answer)
    params = SamplingParams(max_tokens=limit)
    request = Request(tuple(ids), params, turn.arrival, id=number)
    max_len = min(len(ids) + limit, capacity)
    return Sequence(request, turn.answer_id, frozenset([END]), max_len, Stopwatch(turn.arrival, clock=clock))
