"""How many tokens a draft model should draft, given what was accepted so far and what drafts cost.

Pure functions of numbers.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from statistics import median

MAX_MODEL_DRAFTS = 8  # drafts at a time: later ones are hardly ever reached
# Acceptance rate that is assumed before any draft was verified, and how many drafts it weighs as much as.
MODEL_PRIOR_CHANCE, MODEL_PRIOR_WEIGHT = 0.7, 3.0
MODEL_DECAY = 0.97  # of earlier results, with each further draft
MODEL_MIN_GAIN = 1.02  # tokens per time, relative to a plain step; less is noise
MODEL_PAUSE_STEPS, MODEL_MAX_PAUSE_STEPS = 16, 256  # steps until drafts that did not pay are tried again
PASS_TIMES_KEPT = 15  # measurements


class AcceptanceRate:
    """Estimate of the probability that a draft of one sequence is accepted if those before it were."""

    def __init__(self) -> None:
        self.accepted_weight, self.verified_weight = MODEL_PRIOR_CHANCE * MODEL_PRIOR_WEIGHT, MODEL_PRIOR_WEIGHT
        self.pause, self.waited = MODEL_PAUSE_STEPS, 0

    @property
    def rate(self) -> float:
        return self.accepted_weight / self.verified_weight

    def record_verified(self, drafted: int, accepted: int) -> None:
        """Record a step that verified `drafted` tokens and accepted the first `accepted` of them."""
        for index in range(min(drafted, accepted + 1)):
            self.accepted_weight = self.accepted_weight * MODEL_DECAY + (index < accepted)
            self.verified_weight = self.verified_weight * MODEL_DECAY + 1
        if drafted:
            self.waited = 0
            self.pause = MODEL_PAUSE_STEPS if accepted else min(MODEL_MAX_PAUSE_STEPS, 2 * self.pause)
        else:
            self.waited += 1

    @property
    def should_probe(self) -> bool:
        """Whether drafting should be tried although it does not seem to pay."""
        return self.waited >= self.pause


class DraftModelCost:
    """Relative durations of the two models' passes, by the number of sequences in them."""

    def __init__(self, initial_cost: float, step_costs: Callable[[int, int], ListLike[float]]):
        """initial_cost: cost of a draft pass in plain steps of the target, before any was measured; step_costs:
        returns [1 + max_drafts], the cost in plain steps of a step of so many sequences with 0 to `max_drafts`
        drafts in total.
        """
        self.initial_cost, self.step_costs = initial_cost, step_costs
        self.draft_pass_s, self.target_step_s = (
            defaultdict[int, deque[float]](lambda: deque(maxlen=PASS_TIMES_KEPT)) for _ in range(2)
        )

    def record_pass(self, sequences: int, seconds: float) -> None:
        """Record a pass of the draft model, which drafted one token per sequence."""
        self.draft_pass_s[sequences].append(seconds)

    def record_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """Record a step of the target, which verified so many drafts in total."""
        self.target_step_s[sequences].append(seconds / self.step_costs(sequences, drafts)[drafts])

    def pass_cost(self, sequences: int) -> float:
        """Return the cost of a draft pass in plain steps of the target."""
        draft_s, target_s = self.draft_pass_s[sequences], self.target_step_s[sequences]
        return median(draft_s) / median(target_s) if draft_s and target_s else self.initial_cost

    def costs(self, sequences: int) -> list[float]:
        """Return [1 + MAX_MODEL_DRAFTS]: costs in plain steps if every sequence drafts 0, 1, ... tokens."""
        step_costs, pass_cost = self.step_costs(sequences, sequences * MAX_MODEL_DRAFTS), self.pass_cost(sequences)
        return [step_costs[sequences * drafts] + drafts * pass_cost for drafts in range(1 + MAX_MODEL_DRAFTS)]


def choose_draft_count(acceptance: AcceptanceRate, costs: ListLike[float]) -> int:
    """Return the number of drafts that maximizes tokens per time; 0 if drafting does not pay."""

    def gain(drafts: int) -> float:
        return sum(acceptance.rate**index for index in range(1 + drafts)) / costs[drafts]

    best = max(range(1, len(costs)), key=gain)
    return best if gain(best) >= MODEL_MIN_GAIN else int(acceptance.should_probe)
