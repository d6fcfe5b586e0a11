"""The cost of a step that verifies drafts, in plain steps of as many sequences.

It starts with an estimate for the device and is learned from the steps that run, using the lower quartile of
recent durations, because disturbances only make steps longer. Pure functions of numbers.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

TIMES_KEPT = 15  # recent durations per type of step
MIN_TIMES = 5  # needed before they count, also of plain steps
MAX_AGE_STEPS = 500  # older durations may be from a different load or context length

# Estimated duration of a step of N rows, in steps of one row, before any was measured. A CPU's kernels compute
# four rows at a time (INT8, one thread: 1.38 times one row's time for 2 to 4 rows, 1.95 to 8, 2.5 to 12, 3.0 to
# 16); a GPU only waits for the weights, as long as the rows fit its tiles.
CPU_BASE, CPU_FOUR, CPU_ROW, GPU_ROW = 0.85, 0.5, 0.02, 0.01
MIN_COST_FRACTION = 0.25  # of the estimate: a step that seems cheaper was compared with disturbed plain steps
CostEstimate = Callable[[int], float]


def estimate_cpu_cost(rows: int) -> float:
    return 1.0 if rows == 1 else CPU_BASE + CPU_FOUR * -(-rows // 4) + CPU_ROW * rows


def estimate_gpu_cost(rows: int) -> float:
    return 1 + GPU_ROW * (rows - 1)


@dataclass
class RecentTimes:
    """Durations of the last steps of one type."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES_KEPT))
    typical_s: float = 0.0
    newest_step: int = 0  # step number of the newest duration

    def add(self, seconds: float, step: int) -> None:
        if step - self.newest_step > MAX_AGE_STEPS:
            self.recent.clear()
        self.recent.append(seconds)
        self.typical_s, self.newest_step = sorted(self.recent)[len(self.recent) // 4], step


class StepCost:
    def __init__(self, estimate: CostEstimate):
        self.estimate = estimate
        self.steps = 0
        self.times: dict[int, dict[int, RecentTimes]] = {}  # by sequences, then drafts

    def record_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """Record a step of one token per sequence that also verified the given number of drafts in total."""
        self.steps += 1
        self.times.setdefault(sequences, {}).setdefault(drafts, RecentTimes()).add(seconds, self.steps)

    def cost_table(self, sequences: int, max_drafts: int) -> list[float]:
        """Return [1 + max_drafts]: costs of a step with 0, 1, ... drafts in total, at least 1.

        Estimates are scaled by how wrong they were for measured steps: interpolated between two of these, and
        beyond the last decreasing with the distance.
        """
        corrections = {
            drafts: (cost - 1) / (self.estimated_cost(sequences, drafts) - 1)
            for drafts, cost in sorted(self.measured_costs(sequences).items())
        }
        table = [1.0]
        for drafts, correction in enumerate(interpolate_corrections(corrections, max_drafts), 1):
            cost = 1 + (self.estimated_cost(sequences, drafts) - 1) * correction
            table.append(max(table[-1], cost))  # more drafts never cost less
        return table

    def estimated_cost(self, sequences: int, drafts: int) -> float:
        return self.estimate(sequences + drafts) / self.estimate(sequences)

    def measured_costs(self, sequences: int) -> dict[int, float]:
        """Return measured costs by number of drafts."""
        by_drafts = self.times.get(sequences, {})
        durations = {
            drafts: times.typical_s
            for drafts, times in by_drafts.items()
            if len(times.recent) >= MIN_TIMES and times.newest_step > self.steps - MAX_AGE_STEPS
        }
        plain_s = durations.pop(0, None)
        if not plain_s:
            return {}
        lower_bounds = {
            drafts: 1 + MIN_COST_FRACTION * (self.estimated_cost(sequences, drafts) - 1) for drafts in durations
        }
        return {drafts: max(lower_bounds[drafts], seconds / plain_s) for drafts, seconds in durations.items()}


def interpolate_corrections(corrections: Mapping[int, float], max_drafts: int) -> list[float]:
    """Return [max_drafts] correction factors. corrections: by the numbers of drafts that were measured, rising."""
    if not corrections:
        return [1.0] * max_drafts
    drafts = np.arange(1, 1 + max_drafts)
    weight = np.minimum(1.0, max(corrections) / drafts)
    interpolated = weight * np.interp(drafts, list(corrections), list(corrections.values())) + 1 - weight
    return np.maximum(MIN_COST_FRACTION, interpolated).tolist()
