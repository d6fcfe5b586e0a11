"""Whether drafts pay, and how many: by what was accepted so far, and by what a step with them costs.

Of a draft token the chance is estimated by how long the match before it is; a draft is worth the sum of its
tokens' chances of being reached and right. Of all that sequences could draft, so much is verified as brings most
tokens for the time, and what that may lose is bounded by an account: see `Gate`. Knows no engine: numbers in,
numbers out.
"""

from bisect import bisect
from collections.abc import Sequence as ListLike

FORCED = 2**30  # the length that stands for no match: for tokens that a grammar says
BOUNDS = (4, 6, 9, 17, FORCED)  # matches of so many tokens begin a class
# Chance of a token behind a match of each class, before any was seen, and as how many tokens that counts. Careful:
# what copies soon shows that it does.
FIRST = (0.4, 0.5, 0.6, 0.7, 0.8, 0.8)
WEIGHT = 3.0
FORGET = 0.98  # of what was seen, by each token more
LEAST_GAIN = 1.03  # tokens for the time of a plain step; less is noise

BEGIN = 0.6  # plain steps that may be lost before anything was won
INCOME = 0.01  # more of them with each token
MOST = 4.0  # that are kept: what was won long ago is not lost again
PAUSE, LONGEST_PAUSE = 16, 1024  # tokens until something is tried against the odds


class Gate:
    """One sequence's.

    Its account holds plain steps: a draft costs what its step costs more than a plain one, and each token of it
    that is right brings one. What is on the account can be lost, and no more: so drafts that are never right cost
    BEGIN + INCOME a token at most, whatever the estimates say. Against the odds something is tried after a pause,
    which is twice as long each time that it fails.
    """

    def __init__(self, before: "Gate | None" = None) -> None:
        """before: of the last sequence that ended: what it won may be lost, what it lost is not lost again."""
        self.right = [chance * WEIGHT for chance in FIRST]
        self.seen = [WEIGHT for _ in FIRST]
        self.account = BEGIN if before is None else max(BEGIN / 2, before.account)
        self.pause, self.waited = PAUSE, 0

    def chances(self, length: int, count: int) -> list[float]:
        """[count] that each draft token behind a match of `length` tokens is right and all before it are."""
        found, reached = [], 1.0
        for place in range(count):
            kind = bisect(BOUNDS, length + place)
            reached *= self.right[kind] / self.seen[kind]
            found.append(reached)
        return found

    def limit(self, costs: ListLike[float]) -> int:
        """How many drafts the account can pay. costs: [1 + most] of so many, rising, the first 0."""
        return max(0, bisect(costs, self.account) - 1)

    @property
    def tries(self) -> bool:
        """Is it time to try something against the odds?"""
        return self.waited >= self.pause

    def brought(self, tokens: int) -> None:
        """So many tokens came, drafts or not."""
        self.account = min(MOST, self.account + INCOME * tokens)
        self.waited += tokens

    def verified(self, length: int, drafted: int, accepted: int, cost: float) -> None:
        """Of the draft behind a match of `length` so many tokens were right. cost: of its step, in plain ones
        beyond the first."""
        for place in range(min(drafted, accepted + 1)):
            kind = bisect(BOUNDS, length + place)
            self.right[kind] = self.right[kind] * FORGET + (place < accepted)
            self.seen[kind] = self.seen[kind] * FORGET + 1
        self.account = min(MOST, self.account + accepted - cost)
        self.waited = 0
        self.pause = PAUSE if accepted else min(LONGEST_PAUSE, 2 * self.pause)


def share(chances: ListLike[ListLike[float]], prices: ListLike[float]) -> tuple[list[int], float]:
    """How many tokens each sequence drafts so that a step brings most tokens for its time, and how many times as
    many as a plain step that is. chances: of each sequence as `Gate.chances`; prices: by drafts in all."""
    offers = sorted(((p, i) for i, of in enumerate(chances) for p in of), key=lambda offer: (-offer[0], offer[1]))
    tokens = float(len(chances))
    best, taken = 1.0, 0
    for count, (chance, _) in enumerate(offers[: len(prices) - 1], 1):
        tokens += chance
        if (gain := tokens / len(chances) / prices[count]) > best:
            best, taken = gain, count
    counts = [0] * len(chances)
    for _, index in offers[:taken]:
        counts[index] += 1
    return counts, best


def widest(
    chances: ListLike[ListLike[float]], widths: ListLike[int], prices: ListLike[float]
) -> tuple[int, float]:
    """The same where all bring equally many tokens: of `widths` the best."""
    best, width = 1.0, 1
    for candidate in widths:
        drafts = (candidate - 1) * len(chances)
        if drafts < len(prices):
            tokens = len(chances) + sum(sum(of[: candidate - 1]) for of in chances)
            if (gain := tokens / len(chances) / prices[drafts]) > best:
                best, width = gain, candidate
    return width, best
