"""What a step that verifies drafts costs, in plain steps of as many sequences.

It begins with a guess about the device and is learned from the steps that are run: of the last few of a kind the
time that a quarter of them keep, as whatever disturbs a step makes it longer. Knows no engine and no clock.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

KEPT = 15  # last times of a kind of steps
ENOUGH = 5  # before they count, and a plain step's as many
AGE = 500  # steps until a time is of another machine, or of another context

# What a step of so many rows takes, in steps of one, before any was measured. A CPU's kernels compute four rows at
# a time (INT8, one thread: 1.38 times one row's time for 2 to 4 rows, 1.95 to 8, 2.5 to 12, 3.0 to 16); a GPU
# waits for the weights alone, so far as its tiles go.
CPU_BASE, CPU_FOUR, CPU_ROW, GPU_ROW = 0.85, 0.5, 0.02, 0.01
LEAST = 0.25  # of the guess: a step that seems to cost less was measured beside others that were disturbed
Guess = Callable[[int], float]


def cpu_guess(rows: int) -> float:
    return 1.0 if rows == 1 else CPU_BASE + CPU_FOUR * -(-rows // 4) + CPU_ROW * rows


def gpu_guess(rows: int) -> float:
    return 1 + GPU_ROW * (rows - 1)


@dataclass
class Times:
    """Of the last steps of one kind."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    typical: float = 0.0
    step: int = 0  # the newest of them

    def add(self, seconds: float, step: int) -> None:
        if step - self.step > AGE:
            self.last.clear()
        self.last.append(seconds)
        self.typical, self.step = sorted(self.last)[len(self.last) // 4], step


class Price:
    def __init__(self, guess: Guess):
        self.guess = guess
        self.steps = 0
        self.times: dict[int, dict[int, Times]] = {}  # by sequences and drafts

    def stepped(self, sequences: int, drafts: int, seconds: float) -> None:
        """A step has brought one token of each sequence and verified so many drafts beside."""
        self.steps += 1
        self.times.setdefault(sequences, {}).setdefault(drafts, Times()).add(seconds, self.steps)

    def table(self, sequences: int, most: int) -> list[float]:
        """[1 + most] of a step with so many drafts in all: 1 and more. The guess is stretched by what it was wrong
        about what was measured: between two of them evenly, beyond the last the less the farther that is."""
        wrong = {
            drafts: (price - 1) / (self.guessed(sequences, drafts) - 1)
            for drafts, price in sorted(self.measured(sequences).items())
        }
        table = [1.0]
        for drafts, stretch in enumerate(stretches(wrong, most), 1):
            price = 1 + (self.guessed(sequences, drafts) - 1) * stretch
            table.append(max(table[-1], price))  # more never costs less
        return table

    def guessed(self, sequences: int, drafts: int) -> float:
        return self.guess(sequences + drafts) / self.guess(sequences)

    def measured(self, sequences: int) -> dict[int, float]:
        """Prices by the number of drafts."""
        of = self.times.get(sequences, {})
        found = {
            drafts: times.typical
            for drafts, times in of.items()
            if len(times.last) >= ENOUGH and times.step > self.steps - AGE
        }
        plain = found.pop(0, None)
        if not plain:
            return {}
        least = {drafts: 1 + LEAST * (self.guessed(sequences, drafts) - 1) for drafts in found}
        return {drafts: max(least[drafts], seconds / plain) for drafts, seconds in found.items()}


def stretches(wrong: Mapping[int, float], most: int) -> list[float]:
    """[most] of 1 and more drafts. wrong: by the numbers of drafts that were measured, rising."""
    if not wrong:
        return [1.0] * most
    drafts = np.arange(1, 1 + most)
    near = np.minimum(1.0, max(wrong) / drafts)
    found = near * np.interp(drafts, list(wrong), list(wrong.values())) + 1 - near
    return np.maximum(LEAST, found).tolist()
