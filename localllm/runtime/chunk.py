"""How many tokens of prompts a step takes beside those who stream, by how long steps have taken. Pure Python over
counts and seconds: knows no sequence.

A chunk of a prompt holds up every answer that streams beside it for as long as it takes. So a step with one takes
at most two and a half times as long as those who stream take alone, and no longer than people have patience for:
gaps between tokens stay even, and prompts still get up to three fifths of the time. Smaller chunks would even them
further and cost speed, as each step reads all weights however few tokens it brings. Measured with a 1B model in
bfloat16 on two cores: 1.15 s for 512 tokens, 0.53 s for 256, 0.36 s for 128, 0.27 s for 64, 0.11 s for one.
"""

import math
from collections import deque
from statistics import median

PATIENCE_S = 0.4  # between two tokens of an answer: most people read no faster
TIMES = 2.5  # as long as those who stream take alone
UNSEEN_S = 0.01  # that nobody sees, however fast they stream
LEAST = 64  # tokens
KEPT = 8  # times, whose median counts: some were disturbed


class Chunk:
    def __init__(self, most: int):
        """most: tokens of a step that nobody waits for."""
        self.most = most
        self.patience_s, self.times = PATIENCE_S, TIMES
        self.alone: deque[float] = deque(maxlen=KEPT)  # seconds of steps without prompts
        self.each: deque[float] = deque(maxlen=KEPT)  # seconds more that each token of prompts took

    def unhurried(self) -> None:
        """Nobody waits token by token."""
        self.patience_s = self.times = math.inf

    @property
    def alone_s(self) -> float:
        return median(self.alone) if self.alone else 0.0

    def stepped(self, prompts: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long. A few of them tell nothing."""
        if prompts == 0:
            self.alone.append(seconds)
        elif prompts >= min(LEAST, self.most):
            self.each.append(max(0.0, seconds - self.alone_s) / prompts)

    def size(self, *, streaming: bool) -> int:
        """Tokens of prompts in the next step; streaming: somebody gets a token with each step."""
        allowed_s = self.patience_s
        if streaming and self.alone:
            allowed_s = min(allowed_s, max(UNSEEN_S, self.times * self.alone_s))
        each_s = median(self.each) if self.each else 0.0
        if each_s == 0 or each_s * self.most <= allowed_s - self.alone_s:
            return self.most
        return min(self.most, max(LEAST, int((allowed_s - self.alone_s) / each_s)))
