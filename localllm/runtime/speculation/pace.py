"""How many tokens a draft model should guess: by what was accepted so far, and by what guesses cost. Numbers in,
numbers out."""

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from statistics import median

MOST = 8  # guesses at a time: behind so many hardly one is reached
FIRST, WEIGHT = 0.7, 3.0  # chance that a guess is right before any was verified, and as how many that counts
FORGET = 0.97  # of what was verified, by each guess more
LEAST_GAIN = 1.02  # tokens for the time of a plain step; less is noise
PAUSE, LONGEST_PAUSE = 16, 256  # steps until guesses that did not pay are tried again
KEPT = 15  # last times of a kind


class Chance:
    """That a guess for one sequence is right, if those before it were."""

    def __init__(self) -> None:
        self.right, self.seen = FIRST * WEIGHT, WEIGHT
        self.pause, self.waited = PAUSE, 0

    @property
    def rate(self) -> float:
        return self.right / self.seen

    def verified(self, drafted: int, accepted: int) -> None:
        """A step has brought 1 + accepted tokens; so many guesses were verified by it."""
        for place in range(min(drafted, accepted + 1)):
            self.right = self.right * FORGET + (place < accepted)
            self.seen = self.seen * FORGET + 1
        if drafted:
            self.waited = 0
            self.pause = PAUSE if accepted else min(LONGEST_PAUSE, 2 * self.pause)
        else:
            self.waited += 1

    @property
    def tries(self) -> bool:
        """Is it time to try against the odds?"""
        return self.waited >= self.pause


class Pace:
    """What the two models' passes take of each other, by how many sequences share them."""

    def __init__(self, guess: float, table: Callable[[int, int], ListLike[float]]):
        """guess: of a draft model's pass in plain steps of the target, before any was timed; table: [1 + most]
        what a step of so many sequences takes with up to `most` drafts in all, in plain ones."""
        self.guess, self.table = guess, table
        self.passes, self.plain = (defaultdict[int, deque[float]](lambda: deque(maxlen=KEPT)) for _ in range(2))

    def passed(self, sequences: int, seconds: float) -> None:
        """The draft model has guessed one token of each."""
        self.passes[sequences].append(seconds)

    def stepped(self, sequences: int, drafts: int, seconds: float) -> None:
        """The target has verified so many drafts in all."""
        self.plain[sequences].append(seconds / self.table(sequences, drafts)[drafts])

    def price(self, sequences: int) -> float:
        """Of a pass of the draft model, in plain steps of the target."""
        passes, plain = self.passes[sequences], self.plain[sequences]
        return median(passes) / median(plain) if passes and plain else self.guess

    def costs(self, sequences: int) -> list[float]:
        """[1 + MOST] of a step for which each sequence guesses so many, in plain steps."""
        prices, price = self.table(sequences, sequences * MOST), self.price(sequences)
        return [prices[sequences * guesses] + guesses * price for guesses in range(1 + MOST)]


def length(chance: Chance, costs: ListLike[float]) -> int:
    """How many guesses bring most tokens for the time; 0: none pays."""

    def gain(guesses: int) -> float:
        return sum(chance.rate**place for place in range(1 + guesses)) / costs[guesses]

    best = max(range(1, len(costs)), key=gain)
    return best if gain(best) >= LEAST_GAIN else int(chance.tries)
