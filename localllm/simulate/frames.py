"""A running simulation as frames: requests that changed, counts, blocks and percentiles so far.

About MAX_FRAMES frames describe a run of any length: when a run ends is not known before, so the time between two
frames follows from the share of its requests that have arrived.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.simulate.engine import SimulatedEngine
from localllm.simulate.report import format_time
from localllm.simulate.sequence import SimulatedSequence
from localllm.simulate.simulation import PERCENTILES, Records

MAX_FRAMES = 300
LIVE_MEASURES = ("queue", "ttft", "tpot", "e2e")

Frame = dict[str, Any]
RequestRow = tuple[int, float, float | None, float | None, float | None, int, int, int]
"""Number; seconds of arrival, first scheduling, first token and end; tokens of the prompt, of it in the cache, and
of the answer. None for what has not happened yet."""


class Frames:
    """An observer of a simulation that emits a frame now and then."""

    def __init__(self, requests: int, limits: dict[str, float], emit: Callable[[Frame], object]):
        """requests: of the whole load; limits: objectives in seconds; emit: receives each frame, and may raise to
        end the simulation."""
        self.requests, self.limits, self.emit = requests, limits, emit
        self.emitted = 0

    def started(self, engine: SimulatedEngine, records: Records) -> None:
        """Begin a run; a second run replaces the first, whose frames are void."""
        self.engine, self.records = engine, records
        self.rows: list[RequestRow] = []
        self.stages: dict[int, int] = {}  # times that are known, by the number of a running request
        self.arrived_count = self.refused_count = 0
        self.first_at, self.last_at = math.nan, -math.inf
        if self.emitted:
            self.emit({"restart": True})

    def arrived(self, sequence: SimulatedSequence) -> None:
        self.arrived_count += 1
        if math.isnan(self.first_at):
            self.first_at = sequence.request.arrival
        self.rows.append(request_row(sequence))

    def refused(self) -> None:
        self.refused_count += 1

    def finished(self, sequence: SimulatedSequence) -> None:
        self.stages.pop(sequence.request.id, None)
        self.rows.append(request_row(sequence))

    def step(self, now: float) -> None:
        """Emit a frame if it is time."""
        if not self.arrived_count:
            return
        elapsed = now - self.first_at
        expected = elapsed * self.requests / min(self.requests, self.arrived_count + self.refused_count)
        if now - self.last_at >= expected / MAX_FRAMES:
            self.last_at = now
            self.emit_frame(now)

    def ended(self, now: float) -> None:
        self.emit_frame(now)

    def emit_frame(self, now: float) -> None:
        self.emitted += 1
        engine, records = self.engine, self.records
        self.rows += self.changed_rows()
        elapsed, done = now - self.first_at, len(records.arrival)
        rows, self.rows = self.rows, []
        self.emit(
            {
                "t": now,
                "requests": rows,
                "waiting": len(engine.scheduler.waiting),
                "prefill": sum(sequence.produced == 0 for sequence in self.running()),
                "decode": sum(sequence.produced > 0 for sequence in self.running()),
                "done": done,
                "refused": self.refused_count,
                "used_blocks": engine.pool.count - engine.pool.free_count,
                "cached_blocks": unused_cached_blocks(engine.pool),
                "steps": engine.steps,
                "preemptions": engine.scheduler.preemptions,
                "requests_per_s": done / elapsed if elapsed > 0 else None,
                "output_tokens_per_s": engine.output_tokens / elapsed if elapsed > 0 else None,
                "goodput": self.met() / elapsed if elapsed > 0 and self.limits else None,
                **{name: self.percentiles(name) for name in LIVE_MEASURES},
            }
        )

    def running(self) -> Iterator[SimulatedSequence]:
        for sequence in self.engine.scheduler.running:
            assert isinstance(sequence, SimulatedSequence)
            yield sequence

    def changed_rows(self) -> Iterator[RequestRow]:
        """Yield running requests that began or had their first token since the last frame."""
        for sequence in self.running():
            stage = 1 + (sequence.produced > 0)
            if self.stages.get(sequence.request.id) != stage:
                self.stages[sequence.request.id] = stage
                yield request_row(sequence)

    def percentiles(self, name: str) -> list[str]:
        """Return the percentiles of a measure over all requests answered so far, as text."""
        values = self.records.measure(name)
        values = values[~np.isnan(values)]
        if not len(values):
            return ["-"] * len(PERCENTILES)
        return [format_time(float(value)) for value in np.percentile(values, PERCENTILES)]

    def met(self) -> int:
        return self.records.met(self.limits)


def request_row(sequence: SimulatedSequence) -> RequestRow:
    produced = sequence.produced
    return (
        sequence.request.id,
        sequence.request.arrival,
        sequence.stopwatch.scheduled,
        sequence.first_token_at if produced else None,
        sequence.last_token_at if produced >= sequence.answer_len else None,
        sequence.prompt_len,
        sequence.cached_tokens or 0,
        produced,
    )


def unused_cached_blocks(pool: BlockPool) -> int:
    """Return the free blocks that hold the beginnings of later prompts."""
    return sum(not pool.ref_counts[block] for block in pool.key_of)
