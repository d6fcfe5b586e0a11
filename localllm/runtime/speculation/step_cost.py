"""What a step that verifies drafts costs, in plain steps of as many sequences.

It begins with a guess about the device and is learned from the steps that are run: of the last few of a kind the
time that a quarter of them keep, as whatever disturbs a step makes it longer. Knows no engine and no clock.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

TIMES_KEPT = 15  # last times of a kind of steps
MIN_TIMES = 5  # before they count, and a plain step's as many
MAX_AGE_STEPS = 500  # steps until a time is of another machine, or of another context

# What a step of so many rows takes, in steps of one, before any was measured. A CPU's kernels compute four rows at
# a time (INT8, one thread: 1.38 times one row's time for 2 to 4 rows, 1.95 to 8, 2.5 to 12, 3.0 to 16); a GPU
# waits for the weights alone, so far as its tiles go.
CPU_BASE, CPU_FOUR, CPU_ROW, GPU_ROW = 0.85, 0.5, 0.02, 0.01
MIN_COST_FRACTION = (
    0.25  # of the guess: a step that seems to cost less was measured beside others that were disturbed
)
CostEstimate = Callable[[int], float]


def estimate_cpu_cost(rows: int) -> float:
    return 1.0 if rows == 1 else CPU_BASE + CPU_FOUR * -(-rows // 4) + CPU_ROW * rows


def estimate_gpu_cost(rows: int) -> float:
    return 1 + GPU_ROW * (rows - 1)


@dataclass
class RecentTimes:
    """Of the last steps of one kind."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES_KEPT))
    typical_s: float = 0.0
    newest_step: int = 0  # the newest of them

    def add(self, seconds: float, step: int) -> None:
        if step - self.newest_step > MAX_AGE_STEPS:
            self.recent.clear()
        self.recent.append(seconds)
        self.typical_s, self.newest_step = sorted(self.recent)[len(self.recent) // 4], step


class StepCost:
    def __init__(self, estimate: CostEstimate):
        self.estimate = estimate
        self.steps = 0
        self.times: dict[int, dict[int, RecentTimes]] = {}  # by sequences and drafts

    def record_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """A step has brought one token of each sequence and verified so many drafts beside."""
        self.steps += 1
        self.times.setdefault(sequences, {}).setdefault(drafts, RecentTimes()).add(seconds, self.steps)

    def cost_table(self, sequences: int, max_drafts: int) -> list[float]:
        """[1 + most] of a step with so many drafts in all: 1 and more. The guess is stretched by what it was wrong
        about what was measured: between two of them evenly, beyond the last the less the farther that is."""
        wrong = {
            drafts: (price - 1) / (self.estimated_cost(sequences, drafts) - 1)
            for drafts, price in sorted(self.measured_costs(sequences).items())
        }
        table = [1.0]
        for drafts, stretch in enumerate(interpolate_corrections(wrong, max_drafts), 1):
            price = 1 + (self.estimated_cost(sequences, drafts) - 1) * stretch
            table.append(max(table[-1], price))  # more never costs less
        return table

    def estimated_cost(self, sequences: int, drafts: int) -> float:
        return self.estimate(sequences + drafts) / self.estimate(sequences)

    def measured_costs(self, sequences: int) -> dict[int, float]:
        """Prices by the number of drafts."""
        of = self.times.get(sequences, {})
        found = {
            drafts: times.typical_s
            for drafts, times in of.items()
            if len(times.recent) >= MIN_TIMES and times.newest_step > self.steps - MAX_AGE_STEPS
        }
        plain = found.pop(0, None)
        if not plain:
            return {}
        least = {drafts: 1 + MIN_COST_FRACTION * (self.estimated_cost(sequences, drafts) - 1) for drafts in found}
        return {drafts: max(least[drafts], seconds / plain) for drafts, seconds in found.items()}


def interpolate_corrections(corrections: Mapping[int, float], max_drafts: int) -> list[float]:
    """[most] of 1 and more drafts. corrections: by the numbers of drafts that were measured, rising."""
    if not corrections:
        return [1.0] * max_drafts
    drafts = np.arange(1, 1 + max_drafts)
    near = np.minimum(1.0, max(corrections) / drafts)
    found = near * np.interp(drafts, list(corrections), list(corrections.values())) + 1 - near
    return np.maximum(MIN_COST_FRACTION, found).tolist()
