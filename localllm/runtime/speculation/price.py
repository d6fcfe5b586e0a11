"""What a step that verifies drafts costs, in plain steps of as many sequences.

It begins with a guess about the device and is learned from the steps that are run: of the last few of a kind the
time that a quarter of them keep, as whatever disturbs a step makes it longer. Knows no engine and no clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT = 15  # last times of a kind of steps
ENOUGH = 5  # before they count, and a plain step's as many
AGE = 500  # steps until a time is of another machine, or of another context

# What a step of so many rows takes, in steps of one row, before any was measured. On a CPU rows are computed one
# after another while weights are read once; a GPU waits for the weights alone, so far as its tiles go.
CPU_ROW, GPU_ROW = 0.27, 0.01
LEAST = 0.25  # of the guess: a step that seems to cost less was measured beside others that were disturbed
Guess = Callable[[int], float]


def cpu_guess(rows: int) -> float:
    return 1 + CPU_ROW * (rows - 1)


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
        """[1 + most] of a step with so many drafts in all: 1 and more. Between what was measured it rises evenly;
        beyond, the guess is stretched by what it was wrong about the last, the less the farther that is."""
        plain = self.guess(sequences)
        measured = self.measured(sequences)
        known, below = sorted(measured), 0
        table = [1.0]
        for drafts in range(1, 1 + most):
            below = drafts - 1 if drafts - 1 in measured else below
            above = next((count for count in known if count >= drafts), None)
            if above is not None:
                price = table[below] + (measured[above] - table[below]) * (drafts - below) / (above - below)
            else:
                wrong = 1.0
                if known:
                    near = known[-1] / drafts
                    guessed = self.guess(sequences + known[-1]) / plain
                    wrong = max(LEAST, near * (measured[known[-1]] - 1) / (guessed - 1) + 1 - near)
                price = 1 + (self.guess(sequences + drafts) / plain - 1) * wrong
            table.append(max(table[-1], price))  # more never costs less
        return table

    def of(self, sequences: int, drafts: int) -> float:
        return self.table(sequences, drafts)[-1]

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
        least = {
            drafts: 1 + LEAST * (self.guess(sequences + drafts) / self.guess(sequences) - 1) for drafts in found
        }
        return {drafts: max(least[drafts], seconds / plain) for drafts, seconds in found.items()}
