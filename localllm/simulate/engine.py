"""The engine of a simulation: scheduler, block pool and loop are the product's; a step computes nothing and takes
the time that its shape costs.

Decoding sequences are advanced as a group (`DecodeGroup`), and `advance` skips over the steps in which nothing
is decided: no sequence arrives, ends or is preempted. Both leave everything as if each had been scheduled by
itself, which `tests/simulate` compares step for step.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from localllm.runtime.engine import Engine, StepInFlight, TokenEvent, step_shape
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.runner import Runner
from localllm.runtime.scheduler import CHUNK_TIMES_KEPT, ScheduledTokens
from localllm.runtime.sequence import Sequence
from localllm.runtime.step import Readback, StepOutput, StepShape
from localllm.simulate.policies import CountingBlockPool, SimulatedScheduler
from localllm.simulate.sequence import SimulatedSequence
from localllm.simulate.tiers import NO_TIERS, SimulatedDisk, TierSetup

NO_OUTPUT = StepOutput(Readback(torch.empty(0, dtype=torch.int64)), None)
NO_SHAPE = StepShape(0, 0, 0, 0, 0, 0, 0)
FIRST_STEP_STRIDE = 1009  # between the numbers of the first steps of two replicas
SEPARATE_STEPS = 8  # without a group, after one in which a sequence might have been preempted
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
    concurrent_steps: int = 1
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

    @classmethod
    def joined(cls, parts: Iterable["TokenGaps"]) -> "TokenGaps":
        result = cls()
        for part in parts:
            result.seconds.extend(part.seconds)
            result.counts.extend(part.counts)
        return result

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
        number: int = 1,
        tiers: TierSetup = NO_TIERS,
    ):
        """one_by_one: without a group, and never skip steps, for tests; number: of a replica, whose steps deviate
        otherwise than those of others"""
        runner = cast(Runner, IdleDevice(asynchronous, max_running))
        super().__init__(runner, pool, token_budget, max_running, drafter, clock)
        self.now, self.cost, self.on_finish, self.on_step = clock, cost, on_finish, on_step
        self.simulated_drafter = drafter
        self.may_group = not one_by_one and drafter is None and not pool.recurrent
        self.use_scheduler(SimulatedScheduler(pool, token_budget, max_running, self.scheduler.chunk_policy))
        self.first_step = (number - 1) * FIRST_STEP_STRIDE
        self.separate_until = 0  # step before which no sequence joins the group
        self.device_free_at = 0.0  # when the steps launched so far have ended
        self.busy_s = 0.0
        self.gaps = TokenGaps()
        self.admission_settled = False  # whether the waiting sequences were last refused in the present state
        self.caches_prefixes = not isinstance(pool, CountingBlockPool)
        self.block_move_s = tiers.move_s
        self.has_tiers = tiers != NO_TIERS
        self.moved_blocks = 0  # between device and main memory, of which steps have been charged with the time
        self.padding_sequences = 0  # slots of ended sequences that a static batch still computes

    def use_scheduler(self, scheduler: SimulatedScheduler) -> None:
        self.scheduler, self.group = scheduler, scheduler.group

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.group.members) or super().has_unfinished_requests

    # One step

    def add_sequence(self, sequence: Sequence) -> list[TokenEvent]:
        self.admission_settled = False
        self.scheduler.add(sequence)
        return []

    def must_commit_first(self) -> bool:
        return self.drafter is not None and super().must_commit_first()

    def step(self) -> list[TokenEvent]:
        group, scheduler = self.group, cast(SimulatedScheduler, self.scheduler)
        if group.members and not scheduler.can_use_group():
            self.dissolve_group()
        if self.next_load_at <= self.clock():
            self.admission_settled = False
        if not group.members:
            return super().step()
        if self.pool.lower and self.pool.lower.install_loaded():
            scheduler.discard_timing()
        self.in_flight.append(self.launch(scheduler.schedule()))
        self.steps += 1
        if len(self.in_flight) > self.steps_ahead:
            self.commit()
        return []

    @property
    def disk(self) -> SimulatedDisk | None:
        return cast(SimulatedDisk | None, self.pool.lower)

    @property
    def next_load_at(self) -> float:
        """When the next blocks are read from the disk; infinity if none are awaited."""
        return self.disk.next_at if self.disk else math.inf

    def new_moves_s(self) -> float:
        """Return how long the moves between device and main memory take that were decided since the last call."""
        pool = self.pool
        moved = pool.offloaded_count + pool.restored_count + (self.disk.moved_blocks if self.disk else 0)
        pool.pending_copies.clear()
        new, self.moved_blocks = moved - self.moved_blocks, moved
        return new * self.block_move_s

    def dissolve_group(self) -> None:
        """Make the members ordinary running sequences again, for some steps."""
        group = self.group
        members = sorted(group.members.values(), key=lambda sequence: sequence.request.id)
        for launched in self.in_flight:  # has brought a token of all but those that joined with it
            earlier = [s for s in members if s.joined_at < group.launched]
            launched.sampling[:0] = earlier
            launched.sequences[:0] = earlier
        for sequence in members:
            self.leave_group(sequence)
        self.scheduler.running += members
        group.clear()
        self.separate_until = self.steps + SEPARATE_STEPS

    def abandon(self) -> list[SimulatedSequence]:
        """Return all sequences, of an engine that has failed."""
        if self.group.members:
            self.dissolve_group()
        return [*self.running_sequences(), *self.waiting_sequences()]

    def waiting_sequences(self) -> list[SimulatedSequence]:
        return cast(list[SimulatedSequence], self.scheduler.waiting)

    def running_sequences(self) -> list[SimulatedSequence]:
        return [*cast(list[SimulatedSequence], self.scheduler.running), *self.group.members.values()]

    def produced_by(self, sequence: SimulatedSequence) -> int:
        """Return how many tokens of a sequence's answer have been read."""
        in_group = self.group.committed - sequence.joined_at if sequence.joined_at >= 0 else 0
        return sequence.produced + max(0, in_group)

    def leave_group(self, sequence: SimulatedSequence) -> None:
        """Bring a member up to date, with its blocks in the prefix cache."""
        joined_in_flight = sequence.joined_at > self.group.committed  # its prompt enters the cache with that step
        self.group.leave(sequence, self.last_read_at)
        if self.caches_prefixes and sequence.state and not joined_in_flight:
            sequence.state.cache_full_blocks(sequence.token_ids)

    def launch(self, work: ScheduledTokens) -> SimulatedStep:
        group, scheduler = self.group, cast(SimulatedScheduler, self.scheduler)
        if not group.members:
            group.launched += 1
        shape, sampling = self.shape_of(work)
        ends_at = self.start_step(shape)
        if self.on_step:
            self.on_step([*((n, 1) for n in group.members), *((s.request.id, n) for s, n in work)], ends_at)
        if sampling and self.may_group and self.steps >= self.separate_until:
            scheduler.join_group(sampling)
        for sequence in sampling:
            sequence.unread_count = 1
        self.admission_settled = bool(scheduler.waiting) and scheduler.remaining_budget > 0
        return SimulatedStep(
            [s for s, _ in work],
            shape.tokens + shape.prompt_tokens,
            cast(list[Sequence], sampling),
            [len(s.draft_ids) for s in sampling] if self.drafter else [],
            NO_OUTPUT,
            [],
            [],
            {},
            shape,
            ends_at=ends_at,
        )

    def start_step(self, shape: StepShape) -> float:
        """Occupy the device with a step, and return when it ends."""
        seconds = self.cost.seconds(shape, self.first_step + self.steps)
        if self.has_tiers:
            seconds += self.new_moves_s()
        self.busy_s += seconds
        self.device_free_at = max(self.clock(), self.device_free_at) + seconds
        return self.device_free_at

    def shape_of(self, work: ScheduledTokens) -> tuple[StepShape, list[SimulatedSequence]]:
        """Return the shape of a scheduled step, and the sequences outside the group that are sampled in it."""
        shape = step_shape(work)
        if members := len(self.group.members):
            shape = shape._replace(
                sequences=shape.sequences + members,
                tokens=shape.tokens + members,
                context=shape.context + self.group.context,
            )
        if padding := self.padding_sequences:
            decoding = shape.sequences
            shape = shape._replace(
                sequences=decoding + padding,
                tokens=shape.tokens + (padding if decoding else 0),
                context=shape.context + (padding * shape.context // decoding if decoding else 0),
            )
        return shape, [cast(SimulatedSequence, sequence) for sequence, _ in work if not sequence.pending]

    def commit(self) -> list[TokenEvent]:
        if not self.in_flight:
            return []
        launched = self.in_flight.popleft()
        assert isinstance(launched, SimulatedStep)
        clock, before = self.now, self.last_read_at
        clock.now = now = self.last_read_at = max(clock.now, launched.ends_at)
        regular = self.group.commit()  # sequences whose last token came with the step before
        self.output_tokens += regular
        finished = self.group.take_finished()
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
        if self.caches_prefixes:
            size = self.pool.block_size
            for sequence in launched.sequences:
                if (state := sequence.state) and len(state.block_serials) < min(
                    state.length, len(sequence.token_ids)
                ) // size:
                    state.cache_full_blocks(sequence.token_ids)
                    self.admission_settled = False  # a waiting sequence may begin with these blocks
        if self.pool.lower:
            self.group.cache_filled_blocks()
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
        if sequence.joined_at >= 0:
            self.leave_group(sequence)
        sequence.finished = True
        if self.disk and sequence.stopwatch.scheduled is not None:
            computed = sequence.prompt_len - (sequence.cached_tokens or 0)
            self.disk.record_prefill(computed, sequence.first_token_at - sequence.stopwatch.scheduled)
        self.scheduler.finish(sequence)
        self.on_finish(sequence)

    # Many steps

    def advance(self, until: float) -> bool:
        """Run the steps that only decode, up to the one that ends at `until` or later, or with a sequence.

        Returns False without running any if the next step may decide something else.
        """
        scheduler, group = self.scheduler, self.group
        until = min(until, self.next_load_at)
        sampling = any(launched.sampling for launched in self.in_flight)
        if not group.members or scheduler.running or self.clock() >= until or sampling:
            return False
        settled = self.admission_settled and not self.has_tiers  # an attempt may begin a load
        if scheduler.waiting and not (settled or scheduler.running_count >= scheduler.max_running):
            return False
        if len(group.members) > scheduler.token_budget or group.blocks_of_next_step > self.pool.free_count:
            return False
        self.run_decode_steps(until)
        for sequence in group.take_finished():
            self.end(sequence)
        return True

    def run_decode_steps(self, until: float) -> None:
        """Let the time of decode steps pass until `until`, the end of an answer or a shortage of blocks."""
        group, clock, cost, number, pool = (
            self.group,
            self.now,
            self.cost.seconds,
            self.first_step + self.steps,
            self.pool,
        )
        policy, asynchronous = self.scheduler.chunk_policy, self.runner.asynchronous
        members, padding, has_tiers = len(group.members), self.padding_sequences, self.has_tiers
        count = members + padding
        durations: list[float] = []
        now, free_at, before = clock.now, self.device_free_at, self.last_read_at
        ends_at = cast(SimulatedStep, self.in_flight[-1]).ends_at if self.in_flight else None
        gaps, needs_block, last_step = self.gaps, group.needs_block, group.next_end
        if policy:
            policy.begin_step()
        began = now
        while now < until and group.committed != last_step:
            if (due := needs_block.get(group.launched + 1)) and len(due) > pool.free_count:
                break
            clock.now = now  # when a block that a member displaces begins to be written to a disk
            group.extend()
            context = group.context
            if padding:
                context += padding * context // members
            seconds = cost(StepShape(count, count, context, 0, 0, 0, 0), number)
            if has_tiers:
                seconds += self.new_moves_s()
            number += 1
            self.busy_s += seconds
            began = now
            free_at = max(now, free_at) + seconds
            if self.on_step:
                self.on_step([(n, 1) for n in group.members], free_at)
            if asynchronous:
                previous, ends_at = ends_at, free_at
                if previous is None:
                    continue
                now = max(now, previous)
            else:
                now = free_at
            group.committed += 1
            if pool.lower:
                group.cache_filled_blocks()
            self.output_tokens += members
            gaps.add(now - before, members)
            before = now
            durations.append(now - began)
        if policy and durations:
            for seconds in durations[-CHUNK_TIMES_KEPT - 1 : -1]:
                policy.record_step(0, seconds)
            policy.time_step(0, began)
        clock.now, self.device_free_at, self.last_read_at = now, free_at, before
        self.steps = number - self.first_step
        if ends_at is not None:
            step = SimulatedStep([], count, [], [], NO_OUTPUT, [], [], {}, NO_SHAPE, ends_at=ends_at)
            self.in_flight = deque([step])
