"""Forecasts when a full queue accepts a request again, by simulating the engine's present state with its recorded
steps.

A forecast is computed when a request is refused, at most once a second, on the caller's thread and with limited
effort. It estimates when each of the waiting requests will have started. A refused request gets the time at which
a start makes space for one more, after the refused requests before it.
"""

import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.metrics import Stopwatch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.sequence import Sequence as EngineSequence
from localllm.runtime.step import StepShape
from localllm.simulate.cost import MIN_STEPS, FittedCost
from localllm.simulate.engine import Clock, SimulatedEngine
from localllm.simulate.policies import CountingBlockPool
from localllm.simulate.sequence import SimulatedSequence

FALLBACK_S = 5  # without recorded steps or answers
LONGEST_S = 600
FRESH_S = 1.0  # for which a forecast is used, or longer, so that it takes at most 1 / 20 of the time
EFFORT_SHARE = 20
MAX_EFFORT_S = 0.1  # of computing a forecast
MAX_OUTSTANDING = 64  # refused requests that are expected to come back


@dataclass(frozen=True)
class Forecast:
    """When waiting requests start, in seconds after `at`, in order."""

    at: float
    starts: tuple[float, ...]
    horizon_s: float  # simulated time: no further request starts within it

    def start_s(self, index: int) -> float:
        """Return when the request with this index starts; beyond those known, at their mean rate."""
        if index < len(self.starts):
            return self.starts[index]
        mean_s = self.horizon_s / max(1, len(self.starts))
        return self.horizon_s + (index + 1 - len(self.starts)) * mean_s


class QueueForecast:
    """Forecasts of one engine's queue, from the lengths of its last answers and durations of its last steps."""

    def __init__(
        self,
        engine: Engine,
        incoming: deque[EngineSequence],
        steps: deque[tuple[StepShape, float]],
        answer_lens: deque[int],
        clock: Callable[[], float] = time.monotonic,
    ):
        """incoming: sequences that the engine takes after its present step; steps: shapes and seconds of the last
        ones; answer_lens: tokens of the last answers. Other threads change all three."""
        self.engine, self.incoming, self.clock = engine, incoming, clock
        self.steps, self.answer_lens = steps, answer_lens
        self.forecast: Forecast | None = None
        self.fresh_until = -math.inf
        self.promised: list[float] = []  # when refused requests are expected again, on `clock`, ascending
        self.lock = threading.Lock()

    @property
    def is_fresh(self) -> bool:
        return self.clock() < self.fresh_until

    def refresh(self) -> None:
        """Compute a forecast, unless the last one is fresh. Takes up to about MAX_EFFORT_S."""
        with self.lock:
            if self.is_fresh:
                return
            began = self.clock()
            self.forecast = self.compute()
            duration = self.clock() - began
            self.fresh_until = self.clock() + max(FRESH_S, EFFORT_SHARE * duration)

    def retry_after(self) -> int:
        """Return whole seconds after which a refused request should be sent again, and expect it then."""
        forecast, now = self.forecast, self.clock()
        if forecast is None:
            return FALLBACK_S
        self.promised = [at for at in self.promised if at > now][-MAX_OUTSTANDING + 1 :]
        passed = now - forecast.at
        wait_s = forecast.start_s(bisect_right(forecast.starts, passed) + len(self.promised)) - passed
        seconds = min(LONGEST_S, max(1, math.ceil(wait_s)))
        self.promised.append(now + wait_s)
        self.promised.sort()
        return seconds

    def compute(self) -> Forecast | None:
        """Simulate until all waiting requests have started; None if nothing is known of steps or answers."""
        steps, answer_lens = list(self.steps), sorted(self.answer_lens)
        if len(steps) < MIN_STEPS or not answer_lens:
            return None
        at, deadline = self.clock(), time.perf_counter() + MAX_EFFORT_S
        scheduler, clock, real_pool = self.engine.scheduler, Clock(), self.engine.pool
        incoming = list(self.incoming)  # before the others: one that the engine takes meanwhile is in both
        running, waiting = list(scheduler.running), list(dict.fromkeys([*scheduler.waiting, *incoming]))
        # Blocks that sequences share are counted for each of them.
        counted = sum(len(state.block_table) for state in (sequence.state for sequence in running) if state)
        shared = max(0, counted - (real_pool.count - real_pool.free_count))
        pool = CountingBlockPool(real_pool.count + shared + len(running), real_pool.block_size)
        simulated = SimulatedEngine(
            clock,
            FittedCost(steps, "of this engine", deviations=False),
            pool,
            scheduler.token_budget,
            scheduler.max_running,
            asynchronous=self.engine.runner.asynchronous,
            on_finish=lambda sequence: None,
        )
        for sequence in running:
            simulated.scheduler.running.append(self.copy_running(sequence, pool, answer_lens, clock))
        for sequence in waiting:
            simulated.add_sequence(self.copy_waiting(sequence, answer_lens, clock))
        starts: list[float] = []
        left = len(waiting)
        while left and time.perf_counter() < deadline:
            if not simulated.advance(math.inf):
                simulated.step()
            if (now_left := len(simulated.scheduler.waiting)) < left:  # more again after a preemption
                starts += [clock.now] * (left - now_left)
                left = now_left
        return Forecast(at, tuple(starts), clock.now)

    def copy_running(
        self, sequence: EngineSequence, pool: CountingBlockPool, answer_lens: Sequence[int], clock: Clock
    ) -> SimulatedSequence:
        """Return a running sequence as a simulated one, with the blocks that it occupies."""
        known, computed = len(sequence.token_ids), sequence.computed
        copied = self.copy(sequence, known, known - sequence.prompt_len, answer_lens, clock)
        copied.cached_tokens = 0
        copied.state = SequenceState(pool)
        if computed := min(computed, known - 1):
            copied.state.extend(computed)
        return copied

    def copy_waiting(
        self, sequence: EngineSequence, answer_lens: Sequence[int], clock: Clock
    ) -> SimulatedSequence:
        """Return a waiting sequence as a simulated one, without the share of its prompt that is usually cached."""
        scheduler = self.engine.scheduler
        known = len(sequence.token_ids)
        cached = scheduler.cached_tokens / scheduler.prompt_tokens if scheduler.prompt_tokens else 0.0
        return self.copy(
            sequence, max(1, round(known * (1 - cached))), known - sequence.prompt_len, answer_lens, clock
        )

    def copy(
        self, sequence: EngineSequence, tokens: int, produced: int, answer_lens: Sequence[int], clock: Clock
    ) -> SimulatedSequence:
        left = max(1, sequence.max_len - len(sequence.token_ids))
        answer_len = min(left, self.remaining_len(sequence.request.id, produced, answer_lens))
        return SimulatedSequence(
            sequence.request.id,
            0.0,
            [(sequence.request.id, tokens)],
            answer_len,
            tokens + left,
            Stopwatch(0.0, clock=clock),
            answer_id=-sequence.request.id - 1,
            limited=sequence.request.params.max_tokens is not None,
        )

    def remaining_len(self, number: int, produced: int, answer_lens: Sequence[int]) -> int:
        """Return the steps that an answer still takes: one of the lengths that are longer than what it has, or as
        much again. number: selects the length; answer_lens: ascending."""
        longer = bisect_right(answer_lens, produced)
        if longer < len(answer_lens):
            remaining = answer_lens[longer + number % (len(answer_lens) - longer)] - produced
        else:
            remaining = produced
        tokens, accepted = self.engine.output_tokens, self.engine.accepted_tokens
        return max(1, round(remaining * (tokens - accepted) / tokens)) if tokens else max(1, remaining)
