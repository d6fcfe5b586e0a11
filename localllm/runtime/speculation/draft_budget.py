"""Whether drafts pay, and how many: by what was accepted so far, and by what a step with them costs.

Of a draft token the chance is estimated by how long the match before it is; a draft is worth the sum of its
tokens' chances of being reached and right. Of all that sequences could draft, so much is verified as brings most
tokens for the time, and what that may lose is bounded by an account: see `Gate`. Knows no engine: numbers in,
numbers out.
"""

from bisect import bisect
from collections.abc import Sequence as ListLike

FORCED_MATCH = 2**30  # the length that stands for no match: for tokens that a grammar says
MATCH_BOUNDS = (4, 6, 9, 17, FORCED_MATCH)  # matches of so many tokens begin a class
# Chance of a token behind a match of each class, before any was seen, and as how many tokens that counts. Careful:
# what copies soon shows that it does.
PRIOR_CHANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.8)
PRIOR_WEIGHT = 3.0
DECAY = 0.98  # of what was seen, by each token more
MIN_GAIN = 1.03  # tokens for the time of a plain step; less is noise

INITIAL_BALANCE = 0.6  # plain steps that may be lost before anything was won
INCOME_PER_TOKEN = 0.01  # more of them with each token
MAX_BALANCE = 4.0  # that are kept: what was won long ago is not lost again
PAUSE_TOKENS, MAX_PAUSE_TOKENS = 16, 1024  # tokens until something is tried against the odds


class DraftBudget:
    """One sequence's.

    Its account holds plain steps: a draft costs what its step costs more than a plain one, and each token of it
    that is right brings one. What is on the account can be lost, and no more: so drafts that are never right cost
    BEGIN + INCOME a token at most, whatever the estimates say. Against the odds something is tried after a pause,
    which is twice as long each time that it fails.
    """

    def __init__(self, previous: "DraftBudget | None" = None) -> None:
        """previous: of the last sequence that ended: what it won may be lost, what it lost is not lost again."""
        self.accepted_weight = [chance * PRIOR_WEIGHT for chance in PRIOR_CHANCES]
        self.verified_weight = [PRIOR_WEIGHT for _ in PRIOR_CHANCES]
        self.balance = INITIAL_BALANCE if previous is None else max(INITIAL_BALANCE / 2, previous.balance)
        self.pause, self.waited = PAUSE_TOKENS, 0

    def chances(self, match_len: int, count: int) -> list[float]:
        """[count] that each draft token behind a match of `match_len` tokens is right and all before it are."""
        found, reached = [], 1.0
        for place in range(count):
            kind = bisect(MATCH_BOUNDS, match_len + place)
            reached *= self.accepted_weight[kind] / self.verified_weight[kind]
            found.append(reached)
        return found

    def affordable_drafts(self, costs: ListLike[float]) -> int:
        """How many drafts the account can pay. costs: [1 + most] of so many, rising, the first 0."""
        return max(0, bisect(costs, self.balance) - 1)

    @property
    def should_probe(self) -> bool:
        """Is it time to try something against the odds?"""
        return self.waited >= self.pause

    def add_income(self, tokens: int) -> None:
        """So many tokens came, drafts or not."""
        self.balance = min(MAX_BALANCE, self.balance + INCOME_PER_TOKEN * tokens)
        self.waited += tokens

    def record_verified(self, match_len: int, drafted: int, accepted: int, cost: float) -> None:
        """Of the draft behind a match of `match_len` so many tokens were right. cost: of its step, in plain ones
        beyond the first."""
        for place in range(min(drafted, accepted + 1)):
            kind = bisect(MATCH_BOUNDS, match_len + place)
            self.accepted_weight[kind] = self.accepted_weight[kind] * DECAY + (place < accepted)
            self.verified_weight[kind] = self.verified_weight[kind] * DECAY + 1
        self.balance = min(MAX_BALANCE, self.balance + accepted - cost)
        self.waited = 0
        self.pause = PAUSE_TOKENS if accepted else min(MAX_PAUSE_TOKENS, 2 * self.pause)


def choose_draft_counts(
    chances: ListLike[ListLike[float]], step_costs: ListLike[float]
) -> tuple[list[int], float]:
    """How many tokens each sequence drafts so that a step brings most tokens for its time, and how many times as
    many as a plain step that is. chances: of each sequence as `Gate.chances`; step_costs: by drafts in all."""
    offers = sorted(((p, i) for i, of in enumerate(chances) for p in of), key=lambda offer: (-offer[0], offer[1]))
    tokens = float(len(chances))
    best, taken = 1.0, 0
    for count, (chance, _) in enumerate(offers[: len(step_costs) - 1], 1):
        tokens += chance
        if (gain := tokens / len(chances) / step_costs[count]) > best:
            best, taken = gain, count
    counts = [0] * len(chances)
    for _, index in offers[:taken]:
        counts[index] += 1
    return counts, best


def choose_width(
    chances: ListLike[ListLike[float]], widths: ListLike[int], step_costs: ListLike[float]
) -> tuple[int, float]:
    """The same where all bring equally many tokens: of `widths` the best."""
    best, width = 1.0, 1
    for candidate in widths:
        drafts = (candidate - 1) * len(chances)
        if drafts < len(step_costs):
            tokens = len(chances) + sum(sum(of[: candidate - 1]) for of in chances)
            if (gain := tokens / len(chances) / step_costs[drafts]) > best:
                best, width = gain, candidate
    return width, best
