"""How many tokens a step takes while somebody waits for a token of theirs, by how long steps have taken. Pure
Python over counts and seconds: knows no sequence.

A chunk of a long prompt holds up every answer that streams beside it for as long as it takes. Below some size it
takes hardly less time, as a step reads all weights however few tokens it brings. Measured with a 1B model in
bfloat16 on two cores: 1.15 s for 512 tokens, 0.53 s for 256, 0.36 s for 128, 0.27 s for 64, 0.11 s for one.
"""

from collections import deque
from collections.abc import Mapping

PATIENCE_S = 0.4  # between two tokens of an answer: most people read no faster
LEAST = 64  # tokens
KEPT = 4  # times of each size, of which the shortest counts: others were disturbed


class Chunk:
    def __init__(self, most: int, patience_s: float = PATIENCE_S):
        """most: tokens of a step that nobody waits for."""
        self.sizes = [most]  # that are chosen from
        while self.sizes[-1] // 2 >= LEAST:
            self.sizes.append(self.sizes[-1] // 2)
        self.patience_s = patience_s
        self.times: dict[int, deque[float]] = {}  # seconds, by sizes

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. Steps of other sizes than are chosen tell nothing."""
        if tokens in self.sizes:
            self.times.setdefault(tokens, deque(maxlen=KEPT)).append(seconds)

    def budget(self) -> int:
        """Tokens of a step that others wait for: as many as take no longer than they have patience."""
        known = {tokens: min(times) for tokens, times in self.times.items()}
        fast = (size for size in self.sizes if self.expected_s(size, known) <= self.patience_s)
        return next(fast, self.sizes[-1])

    @staticmethod
    def expected_s(size: int, known: Mapping[int, float]) -> float:
        """Of a step of so many tokens: as it was, or less where fewer tokens are so fast meanwhile that so many
        cannot take as long. Before it is known, its share of what more tokens took; 0 if nothing is known."""
        most = [seconds * size / tokens for tokens, seconds in known.items() if tokens <= size]
        share = [known[tokens] * size / tokens for tokens in sorted(known) if tokens > size]
        return min(most) if most else next(iter(share), 0.0)
