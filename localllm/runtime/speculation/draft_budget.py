"""Whether drafts pay, and how many: from what was accepted so far, and what a step with drafts costs.

The probability of a draft token is estimated from the length of the match before it; a draft is worth the sum of
its tokens' probabilities of being reached and right. Of all possible drafts of a step, as many are verified as
maximize tokens per time, and possible losses are limited by a balance, see `DraftBudget`. Pure functions of
numbers.
"""

from bisect import bisect
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
FORCED_MATCH = 2**30  # the match length that stands for tokens that a grammar forces
MATCH_BOUNDS = (4, 6, 9, 17, FORCED_MATCH)  # match lengths at which a new class begins
# Acceptance rate behind a match of each class before any was verified, and how many tokens it weighs as much as.
# The rates are cautious: where text is copied, the estimate rises soon.
PRIOR_CHANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.8)
PRIOR_WEIGHT = 3.0
DECAY = 0.98  # of earlier results, with each further token
MIN_GAIN = 1.03  # tokens per time, relative to a plain step; less is noise
INITIAL_BALANCE = 0.6  # plain steps that may be lost before any was gained
INCOME_PER_TOKEN = 0.01  # plain steps earned with each token
MAX_BALANCE = 4.0  # plain steps: old gains cannot all be lost again
PAUSE_TOKENS, MAX_PAUSE_TOKENS = 16, 1024  # tokens until drafting is tried again although it does not seem to pay


class DraftBudget:
    """Estimates and balance of one sequence.

    The balance is in plain steps: a draft costs the additional time of its step, and each accepted token earns
    one. Only the balance can be lost, so that drafts that are never right cost at most INITIAL_BALANCE +
    INCOME_PER_TOKEN a token, whatever the estimates say. Drafts that do not seem to pay are tried after a pause,
    which doubles with each failure.
    """

    def __init__(self, previous: "DraftBudget | None" = None) -> None:
        """previous: budget of the last finished sequence, whose balance is inherited with a lower limit."""
        self.accepted_weight = [chance * PRIOR_WEIGHT for chance in PRIOR_CHANCES]
        self.verified_weight = [PRIOR_WEIGHT for _ in PRIOR_CHANCES]
        self.balance = INITIAL_BALANCE if previous is None else max(INITIAL_BALANCE / 2, previous.balance)
        self.pause, self.waited = PAUSE_TOKENS, 0

    def chances(self, match_len: int, count: int) -> list[float]:
        """Return [count]: probabilities that each token behind the match, and all drafts before it, are right."""
        probabilities, reached = [], 1.0
        for index in range(count):
            length_class = bisect(MATCH_BOUNDS, match_len + index)
            reached *= self.accepted_weight[length_class] / self.verified_weight[length_class]
            probabilities.append(reached)
        return probabilities

    def affordable_drafts(self, costs: ListLike[float]) -> int:
        """Return how many drafts the balance can pay for. costs: [1 + max drafts], rising from 0."""
        return max(0, bisect(costs, self.balance) - 1)

    @property
    def should_probe(self) -> bool:
        """Whether drafting should be tried although it does not seem to pay."""
        return self.waited >= self.pause

    def add_income(self, tokens: int) -> None:
        """Record generated tokens, drafted or not."""
        self.balance = min(MAX_BALANCE, self.balance + INCOME_PER_TOKEN * tokens)
        self.waited += tokens

    def record_verified(self, match_len: int, drafted: int, accepted: int, cost: float) -> None:
        """Record the verification of a draft behind a match.

        cost: of its step in plain steps, beyond the first.
        """
        for index in range(min(drafted, accepted + 1)):
            length_class = bisect(MATCH_BOUNDS, match_len + index)
            self.accepted_weight[length_class] = self.accepted_weight[length_class] * DECAY + (index < accepted)
            self.verified_weight[length_class] = self.verified_weight[length_class] * DECAY + 1
        self.balance = min(MAX_BALANCE, self.balance + accepted - cost)
        self.waited = 0
        self.pause = PAUSE_TOKENS if accepted else min(MAX_PAUSE_TOKENS, 2 * self.pause)


def choose_draft_counts(
    chances: ListLike[ListLike[float]], step_costs: ListLike[float]
) -> tuple[list[int], float]:
    """Choose how many tokens each sequence drafts to maximize tokens per time, and return the gain over a plain
    step.

    chances: `DraftBudget.chances` of each sequence; step_costs: by the total number of drafts.
    """
    offers = sorted(
        ((p, i) for i, sequence_chances in enumerate(chances) for p in sequence_chances),
        key=lambda offer: (-offer[0], offer[1]),
    )
    tokens = float(len(chances))
    best, best_count = 1.0, 0
    for count, (chance, _) in enumerate(offers[: len(step_costs) - 1], 1):
        tokens += chance
        if (gain := tokens / len(chances) / step_costs[count]) > best:
            best, best_count = gain, count
    counts = [0] * len(chances)
    for _, index in offers[:best_count]:
        counts[index] += 1
    return counts, best


def choose_width(
    chances: ListLike[ListLike[float]], widths: ListLike[int], step_costs: ListLike[float]
) -> tuple[int, float]:
    """Choose like `choose_draft_counts`, but one of `widths` tokens for all sequences."""
    best, width = 1.0, 1
    for candidate in widths:
        drafts = (candidate - 1) * len(chances)
        if drafts < len(step_costs):
            tokens = len(chances) + sum(sum(sequence_chances[: candidate - 1]) for sequence_chances in chances)
            if (gain := tokens / len(chances) / step_costs[drafts]) > best:
                best, width = gain, candidate
    return width, best


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
        """Record a step of the target that verified the given number of drafts in total."""
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
