"""How many tokens a draft model should guess: by what was accepted so far, and by what guesses cost. Numbers in,
numbers out."""

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from statistics import median

MAX_MODEL_DRAFTS = 8  # guesses at a time: behind so many hardly one is reached
MODEL_PRIOR_CHANCE, MODEL_PRIOR_WEIGHT = (
    0.7,
    3.0,
)  # chance that a guess is right before any was verified, and as how many that counts
MODEL_DECAY = 0.97  # of what was verified, by each guess more
MODEL_MIN_GAIN = 1.02  # tokens for the time of a plain step; less is noise
MODEL_PAUSE_STEPS, MODEL_MAX_PAUSE_STEPS = 16, 256  # steps until guesses that did not pay are tried again
PASS_TIMES_KEPT = 15  # last times of a kind


class AcceptanceRate:
    """That a guess for one sequence is right, if those before it were."""

    def __init__(self) -> None:
        self.accepted_weight, self.verified_weight = MODEL_PRIOR_CHANCE * MODEL_PRIOR_WEIGHT, MODEL_PRIOR_WEIGHT
        self.pause, self.waited = MODEL_PAUSE_STEPS, 0

    @property
    def rate(self) -> float:
        return self.accepted_weight / self.verified_weight

    def record_verified(self, drafted: int, accepted: int) -> None:
        """A step has brought 1 + accepted tokens; so many guesses were verified by it."""
        for place in range(min(drafted, accepted + 1)):
            self.accepted_weight = self.accepted_weight * MODEL_DECAY + (place < accepted)
            self.verified_weight = self.verified_weight * MODEL_DECAY + 1
        if drafted:
            self.waited = 0
            self.pause = MODEL_PAUSE_STEPS if accepted else min(MODEL_MAX_PAUSE_STEPS, 2 * self.pause)
        else:
            self.waited += 1

    @property
    def should_probe(self) -> bool:
        """Is it time to try against the odds?"""
        return self.waited >= self.pause


class DraftModelCost:
    """What the two models' passes take of each other, by how many sequences share them."""

    def __init__(self, initial_cost: float, step_costs: Callable[[int, int], ListLike[float]]):
        """initial_cost: of a draft model's pass in plain steps of the target, before any was timed; step_costs:
        [1 + most]
        what a step of so many sequences takes with up to `most` drafts in all, in plain ones."""
        self.initial_cost, self.step_costs = initial_cost, step_costs
        self.draft_pass_s, self.target_step_s = (
            defaultdict[int, deque[float]](lambda: deque(maxlen=PASS_TIMES_KEPT)) for _ in range(2)
        )

    def record_pass(self, sequences: int, seconds: float) -> None:
        """The draft model has guessed one token of each."""
        self.draft_pass_s[sequences].append(seconds)

    def record_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """The target has verified so many drafts in all."""
        self.target_step_s[sequences].append(seconds / self.step_costs(sequences, drafts)[drafts])

    def pass_cost(self, sequences: int) -> float:
        """Of a pass of the draft model, in plain steps of the target."""
        passes, plain = self.draft_pass_s[sequences], self.target_step_s[sequences]
        return median(passes) / median(plain) if passes and plain else self.initial_cost

    def costs(self, sequences: int) -> list[float]:
        """[1 + MOST] of a step for which each sequence guesses so many, in plain steps."""
        prices, price = self.step_costs(sequences, sequences * MAX_MODEL_DRAFTS), self.pass_cost(sequences)
        return [prices[sequences * guesses] + guesses * price for guesses in range(1 + MAX_MODEL_DRAFTS)]


def choose_draft_count(acceptance: AcceptanceRate, costs: ListLike[float]) -> int:
    """How many guesses bring most tokens for the time; 0: none pays."""

    def gain(guesses: int) -> float:
        return sum(acceptance.rate**place for place in range(1 + guesses)) / costs[guesses]

    best = max(range(1, len(costs)), key=gain)
    return best if gain(best) >= MODEL_MIN_GAIN else int(acceptance.should_probe)
