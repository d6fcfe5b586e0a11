"""A running simulation as frames: requests that changed, counts, blocks and percentiles so far.

About MAX_FRAMES frames describe a run of any length: when a run ends is not known before, so the time between two
frames follows from the share of its requests that have arrived.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.simulate.fleet import Fleet
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

    def started(self, fleet: Fleet, records: Records) -> None:
        """Begin a run; a second run replaces the first, whose frames are void."""
        self.fleet, self.records = fleet, records
        self.rows: list[RequestRow] = []  # of answered requests, since the last frame
        self.known: dict[int, RequestRow] = {}  # the newest rows of unanswered requests, by number
        self.first_at, self.now = fleet.load.next_at(), -math.inf
        if self.emitted:
            self.emit({"restart": True})

    def finished(self, sequence: SimulatedSequence, prefilled: SimulatedSequence | None) -> None:
        self.known.pop(sequence.request.id, None)
        self.rows.append(request_row(sequence, prefilled, sequence.produced, sequence.last_token_at))

    def step(self, now: float) -> None:
        """Emit a frame if it is time."""
        if not self.fleet.request_count:
            return
        expected = (now - self.first_at) * self.requests / min(self.requests, self.fleet.request_count)
        if now - self.now >= expected / MAX_FRAMES:
            self.emit_frame(now)

    def ended(self, now: float) -> None:
        self.emit_frame(max(now, self.now))

    def emit_frame(self, now: float) -> None:
        self.emitted += 1
        self.now = now
        fleet, records = self.fleet, self.records
        rows, self.rows = [*self.rows, *self.changed_rows()], []
        engines = [replica.engine for replica in fleet.replicas]
        elapsed, done = now - self.first_at, len(records.arrival)
        produced = [sequence.produced for engine in engines for sequence in engine.running_sequences()]
        self.emit(
            {
                "t": now,
                "requests": rows,
                "waiting": sum(len(engine.scheduler.waiting) for engine in engines),
                "prefill": produced.count(0),
                "decode": len(produced) - produced.count(0),
                "done": done,
                "refused": fleet.refused,
                "used_blocks": sum(engine.pool.count - engine.pool.free_count for engine in engines),
                "cached_blocks": sum(unused_cached_blocks(engine.pool) for engine in engines),
                "steps": sum(engine.steps for engine in fleet.engines),
                "preemptions": sum(engine.scheduler.preemptions for engine in fleet.engines),
                "requests_per_s": done / elapsed if elapsed > 0 else None,
                "output_tokens_per_s": self.output_tokens / elapsed if elapsed > 0 else None,
                "goodput": self.met() / elapsed if elapsed > 0 and self.limits else None,
                **{name: self.percentiles(name) for name in LIVE_MEASURES},
            }
        )

    @property
    def output_tokens(self) -> int:
        return sum(engine.output_tokens for engine in self.fleet.engines)

    def changed_rows(self) -> Iterator[RequestRow]:
        """Yield unanswered requests that came, began, had their first token or failed since the last frame."""
        requests, known = self.fleet.requests, self.known
        for engine in (replica.engine for replica in self.fleet.replicas):
            for sequence in (*engine.waiting_sequences(), *engine.running_sequences()):
                number = sequence.request.id
                row = request_row(sequence, requests[number].prefilled, engine.produced_by(sequence))
                if number not in known or known[number][:4] != row[:4]:
                    known[number] = row
                    yield row
        for number in known.keys() - requests.keys() - {request.number for request in self.fleet.held}:
            row = known.pop(number)
            yield (*row[:4], self.now, *row[5:])

    def percentiles(self, name: str) -> list[str]:
        """Return the percentiles of a measure over all requests answered so far, as text."""
        values = self.records.measure(name)
        values = values[~np.isnan(values)]
        if not len(values):
            return ["-"] * len(PERCENTILES)
        return [format_time(float(value)) for value in np.percentile(values, PERCENTILES)]

    def met(self) -> int:
        return self.records.met(self.limits)


def request_row(
    sequence: SimulatedSequence,
    prefilled: SimulatedSequence | None,
    produced: int,
    ended_at: float | None = None,
) -> RequestRow:
    """prefilled: the sequence that computed the prompt and the first token, if that was another one; produced:
    tokens of `sequence`, without those"""
    first = prefilled or sequence
    produced += prefilled.produced if prefilled else 0
    return (
        sequence.request.id,
        first.request.arrival,
        first.stopwatch.scheduled,
        first.first_token_at if produced else None,
        ended_at,
        first.prompt_len,
        first.cached_tokens or 0,
        produced,
    )


def unused_cached_blocks(pool: BlockPool) -> int:
    """Return the free blocks that hold the beginnings of later prompts."""
    return sum(block < pool.count and not pool.ref_counts[block] for block in pool.key_of)
