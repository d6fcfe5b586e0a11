"""The engine of a simulation: scheduler, block pool and loop are the product's; a step computes nothing and takes
the time that its shape costs.

`advance` skips over decode steps in which nothing is decided: no sequence arrives, ends or runs out of blocks. It
leaves everything as if they had run one by one, which `tests/simulate` compares step for step.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from localllm.runtime.engine import Engine, StepInFlight, TokenEvent, step_shape
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.runner import Runner
from localllm.runtime.scheduler import CHUNK_TIMES_KEPT, ScheduledTokens, priority_key
from localllm.runtime.sequence import Sequence
from localllm.runtime.step import Readback, StepOutput, StepShape
from localllm.simulate.policies import CountingBlockPool
from localllm.simulate.sequence import SimulatedSequence

NO_OUTPUT = StepOutput(Readback(torch.empty(0, dtype=torch.int64)), None)
NO_SHAPE = StepShape(0, 0, 0, 0, 0, 0, 0)
DRAFT_TOKEN = 0
ACCEPTANCE_DRAWS = 2**16


class Clock:
    """The time of a simulation, in seconds since its start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StepCost(Protocol):
    """The durations of steps."""

    def seconds(self, shape: StepShape, number: int) -> float:
        """Return the duration of the step with this number, which selects its deviation from the mean."""
        ...


@dataclass
class IdleDevice:
    """What the engine needs of a runner, without a model."""

    asynchronous: bool  # whether the device computes while the host continues
    max_running: int
    model: None = None
    deterministic: bool = False


@dataclass(frozen=True)
class SimulatedStep(StepInFlight):
    ends_at: float = 0.0


class SimulatedDrafter:
    """Drafts a fixed number of tokens, each of which is accepted with the same probability if those before it
    are."""

    def __init__(self, drafts: int, acceptance: float, seed: int):
        draws = np.random.default_rng(seed).random((ACCEPTANCE_DRAWS, drafts))
        self.accepted_counts: list[int] = (draws < acceptance).cumprod(axis=1).sum(axis=1).tolist()
        self.drafts = drafts

    def accepted_count(self, number: int, position: int) -> int:
        """Return how many draft tokens of a sequence are right behind a position of its answer."""
        return self.accepted_counts[(number * 7919 + position * 104729) % ACCEPTANCE_DRAWS]

    def may_draft(self, sequence: Sequence) -> bool:
        return sequence.max_drafts > 0

    def draft(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if len(sequence.token_ids) - sequence.computed == 1:
                sequence.draft_ids = [DRAFT_TOKEN] * min(self.drafts, sequence.max_drafts)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None: ...

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...


class TokenGaps:
    """The gaps between tokens (ITL) of all sequences: each with the number of times that it occurred."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self.counts = array("q")

    def add(self, seconds: float, count: int = 1) -> None:
        self.seconds.append(seconds)
        self.counts.append(count)


class SimulatedEngine(Engine):
    """on_finish: called with each sequence that ends, when its last token has been read; on_step: called with the
    scheduled tokens of each step, for tests."""

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        pool: BlockPool,
        token_budget: int,
        max_running: int,
        *,
        asynchronous: bool,
        on_finish: Callable[[SimulatedSequence], object],
        drafter: SimulatedDrafter | None = None,
        on_step: Callable[[list[tuple[int, int]], float], object] | None = None,
        one_by_one: bool = False,
    ):
        """one_by_one: never skip steps, for tests."""
        runner = cast(Runner, IdleDevice(asynchronous, max_running))
        super().__init__(runner, pool, token_budget, max_running, drafter, clock)
        self.now, self.cost, self.on_finish, self.on_step = clock, cost, on_finish, on_step
        self.simulated_drafter = drafter
        self.one_by_one = one_by_one
        self.device_free_at = 0.0  # when the steps launched so far have ended
        self.busy_s = 0.0
        self.gaps = TokenGaps()
        self.only_decodes = False  # whether every running sequence is decoding, as of the last step
        self.admission_settled = False  # whether the waiting sequences were last refused in the present state
        self.caches_prefixes = not isinstance(pool, CountingBlockPool)
        self.padding_sequences = 0  # slots of ended sequences that a static batch still computes

    # One step

    def add_sequence(self, sequence: Sequence) -> list[TokenEvent]:
        self.admission_settled = False
        self.scheduler.add(sequence)
        return []

    def must_commit_first(self) -> bool:
        return self.drafter is not None and super().must_commit_first()

    def launch(self, work: ScheduledTokens) -> SimulatedStep:
        shape, sampling = self.shape_of(work)
        ends_at = self.start_step(shape)
        for sequence in sampling:
            sequence.unread_count = 1
        if self.on_step:
            self.on_step([(s.request.id, count) for s, count in work], ends_at)
        scheduler = self.scheduler
        self.only_decodes = len(sampling) == len(scheduler.running)
        self.admission_settled = bool(scheduler.waiting) and scheduler.remaining_budget > 0
        return SimulatedStep(
            [s for s, _ in work],
            shape.tokens + shape.prompt_tokens,
            sampling,
            [len(s.draft_ids) for s in sampling] if self.drafter else [],
            NO_OUTPUT,
            [],
            [],
            {},
            shape,
            ends_at,
        )

    def start_step(self, shape: StepShape) -> float:
        """Occupy the device with a step, and return when it ends."""
        seconds = self.cost.seconds(shape, self.steps)
        self.busy_s += seconds
        self.device_free_at = max(self.clock(), self.device_free_at) + seconds
        return self.device_free_at

    def shape_of(self, work: ScheduledTokens) -> tuple[StepShape, list[Sequence]]:
        """Return the shape of a scheduled step, and the sequences that are sampled in it."""
        shape = step_shape(work)
        if padding := self.padding_sequences:
            decoding = shape.sequences
            shape = shape._replace(
                sequences=decoding + padding,
                tokens=shape.tokens + (padding if decoding else 0),
                context=shape.context + (padding * shape.context // decoding if decoding else 0),
            )
        return shape, [sequence for sequence, _ in work if not sequence.pending]

    def commit(self) -> list[TokenEvent]:
        launched, self.in_flight = self.in_flight, None
        if launched is None:
            return []
        assert isinstance(launched, SimulatedStep)
        clock, before = self.now, self.last_read_at
        clock.now = now = self.last_read_at = max(clock.now, launched.ends_at)
        finished: list[SimulatedSequence] = []
        regular = 0  # sequences whose last token came with the step before
        for index, sequence in enumerate(launched.sampling):
            if sequence.finished:
                continue
            sequence = cast(SimulatedSequence, sequence)
            sequence.unread_count = int(sequence.ends_with_unread)
            count = 1 if self.drafter is None else self.accept_drafts(sequence, launched.draft_counts[index])
            if sequence.produced == 0:
                sequence.first_token_at = now
            elif sequence.last_token_at == before and count == 1:
                regular += 1
            else:
                self.gaps.add(now - sequence.last_token_at)
            if count > 1:
                self.gaps.add(0.0, count - 1)
            sequence.last_token_at = now
            sequence.produced += count
            sequence.prompt_spans.length += count
            self.output_tokens += count
            if self.drafter and launched.draft_counts[index] and sequence.state:
                sequence.state.rollback(min(sequence.computed, len(sequence.token_ids) - 1))
            if sequence.produced >= sequence.answer_len:
                finished.append(sequence)
        if regular:
            self.gaps.add(now - before, regular)
        size = self.pool.block_size
        for sequence in launched.sequences if self.caches_prefixes else ():
            if (state := sequence.state) and len(state.block_serials) < min(
                state.length, len(sequence.token_ids)
            ) // size:
                state.cache_full_blocks(sequence.token_ids)
        for sequence in finished:
            self.end(sequence)
        return []

    def accept_drafts(self, sequence: SimulatedSequence, drafts: int) -> int:
        """Return how many tokens a step brings, of which all but one are accepted drafts."""
        assert self.simulated_drafter
        sequence.clear_drafts()
        if not drafts:
            return 1
        accepted = min(drafts, self.simulated_drafter.accepted_count(sequence.request.id, sequence.produced))
        count = min(1 + accepted, sequence.answer_len - sequence.produced)
        self.draft_tokens += drafts
        self.accepted_tokens += min(drafts, count - 1)
        return count

    def end(self, sequence: SimulatedSequence) -> None:
        self.admission_settled = False
        sequence.finished = True
        self.scheduler.finish(sequence)
        self.on_finish(sequence)

    # Many steps

    def advance(self, until: float) -> bool:
        """Run the steps that only decode, up to the one that ends at `until` or later, or with a sequence.

        Returns False without running any if the next step may decide something else.
        """
        scheduler = self.scheduler
        running = scheduler.running
        if not self.only_decodes or self.one_by_one or self.drafter is not None or not running:
            return False
        if scheduler.waiting and not (self.admission_settled or len(running) >= scheduler.max_running):
            return False
        if len(running) > scheduler.token_budget or self.clock() >= until:
            return False
        sequences = cast(list[SimulatedSequence], sorted(running, key=priority_key))
        most = min(s.answer_len - s.produced for s in sequences)
        boundaries, most = self.block_boundaries(sequences, most)
        if most < 1:
            return False
        steps = self.run_decode_steps(sequences, most, until)
        for step, index in boundaries:
            if step > steps:
                break
            table = sequences[index].state.block_table  # pyright: ignore[reportOptionalMemberAccess]
            table.append(self.pool.allocate(table[-1]))
        self.commit_decode_steps(sequences, steps)
        return True

    def block_boundaries(self, sequences: list[SimulatedSequence], most: int) -> tuple[list[tuple[int, int]], int]:
        """Return the steps in which a sequence needs a block, as (step, index), and the number of steps for which
        there are blocks."""
        boundaries: list[tuple[int, int]] = []
        size = self.pool.block_size
        for index, sequence in enumerate(sequences):
            state = sequence.state
            assert state
            first = len(state.block_table) * size - state.length + 1
            if first <= most:
                boundaries += [(step, index) for step in range(first, most + 1, size)]
        boundaries.sort()
        if len(boundaries) > (free := self.pool.free_count):
            most = boundaries[free][0] - 1
        return boundaries, most

    def run_decode_steps(self, sequences: list[SimulatedSequence], most: int, until: float) -> int:
        """Let the time of up to `most` steps pass, and return their number."""
        clock, cost, number = self.now, self.cost.seconds, self.steps
        policy = self.scheduler.chunk_policy
        count = len(sequences) + self.padding_sequences
        context = sum(s.state.length for s in sequences if s.state)
        if self.padding_sequences:
            context += self.padding_sequences * context // len(sequences)
        durations: list[float] = []
        in_flight = cast(SimulatedStep | None, self.in_flight)
        now, free_at, before, steps = clock.now, self.device_free_at, self.last_read_at, 0
        if policy:
            policy.begin_step()
        began = now
        regular = all(s.last_token_at == before for s in sequences if s.produced)
        while steps < most and now < until:
            steps += 1
            context += count
            seconds = cost(StepShape(count, count, context, 0, 0, 0, 0), number)
            number += 1
            self.busy_s += seconds
            began, ended = now, free_at
            free_at = max(now, free_at) + seconds
            now = max(now, ended) if in_flight else free_at
            if self.on_step:
                self.on_step([(s.request.id, 1) for s in sequences], free_at)
            if steps == 1 and (in_flight or not regular):
                self.read_first_tokens(sequences, now, before)
            else:
                self.gaps.add(now - before, len(sequences))
            before = now
            durations.append(now - began)
        if policy:
            for seconds in durations[-CHUNK_TIMES_KEPT - 1 : -1]:
                policy.record_step(0, seconds)
            policy.time_step(0, began)
        clock.now, self.device_free_at, self.last_read_at, self.steps = now, free_at, before, number
        return steps

    def read_first_tokens(self, sequences: list[SimulatedSequence], now: float, before: float) -> None:
        """Record the tokens of a step in which some sequences do not continue from the step before."""
        regular = 0
        for sequence in sequences:
            if sequence.produced == 0:
                sequence.first_token_at = now
            elif sequence.last_token_at == before:
                regular += 1
            else:
                self.gaps.add(now - sequence.last_token_at)
        if regular:
            self.gaps.add(now - before, regular)

    def commit_decode_steps(self, sequences: list[SimulatedSequence], steps: int) -> None:
        """Do what `commit` does for `steps` steps that brought one token of each sequence."""
        now, size, caches = self.now.now, self.pool.block_size, self.caches_prefixes
        in_flight = cast(SimulatedStep | None, self.in_flight)
        self.output_tokens += steps * len(sequences)
        finished: list[SimulatedSequence] = []
        for sequence in sequences:
            state = sequence.state
            assert state
            state.length += steps
            sequence.produced += steps
            sequence.prompt_spans.length += steps
            sequence.last_token_at = now
            if caches and len(state.block_serials) < min(state.length, sequence.prompt_spans.length) // size:
                state.cache_full_blocks(sequence.token_ids)
            if sequence.produced >= sequence.answer_len:
                finished.append(sequence)
        if in_flight:
            self.in_flight = SimulatedStep(
                list(sequences),
                len(sequences),
                list(sequences),
                [],
                NO_OUTPUT,
                [],
                [],
                {},
                NO_SHAPE,
                self.device_free_at,
            )
        for sequence in finished:
            self.end(sequence)
        self.only_decodes = True
