"""Chunked prefill: how many prompt tokens a step takes, given how long steps have taken. Pure Python over counts
and seconds; it knows no sequence.

A chunk delays every answer that streams beside it by the time it takes. So a step with a chunk takes at most two
and a half times as long as the decoding streams take alone, and never more than 0.4 s: gaps between tokens stay
even, and prompts still get up to three fifths of the time. Smaller chunks would even the gaps further and cost
throughput, because each step reads all weights however few tokens it computes. Measured with a 1B model in
bfloat16 on two cores: 1.15 s for 512 tokens, 0.53 s for 256, 0.36 s for 128, 0.27 s for 64, 0.11 s for one.
"""

import math
from collections import deque
from statistics import median

MAX_TOKEN_GAP_S = 0.4  # between two tokens of an answer: most people read no faster
MAX_SLOWDOWN = 2.5  # as long as those who stream take alone
UNNOTICED_GAP_S = 0.01  # that nobody sees, however fast they stream
MIN_CHUNK_TOKENS = 64  # tokens
CHUNK_TIMES_KEPT = 8  # times, whose median counts: some were disturbed


class ChunkPolicy:
    def __init__(self, max_tokens: int):
        """max_tokens: tokens of a step that nobody waits for."""
        self.max_tokens = max_tokens
        self.max_gap_s, self.max_slowdown = MAX_TOKEN_GAP_S, MAX_SLOWDOWN
        self.decode_step_s: deque[float] = deque(maxlen=CHUNK_TIMES_KEPT)  # seconds of steps without prompts
        self.prompt_token_s: deque[float] = deque(
            maxlen=CHUNK_TIMES_KEPT
        )  # seconds more that each token of prompts took

    def prefer_throughput(self) -> None:
        """Nobody waits token by token."""
        self.max_gap_s = self.max_slowdown = math.inf

    @property
    def typical_decode_step_s(self) -> float:
        return median(self.decode_step_s) if self.decode_step_s else 0.0

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long. A few of them tell nothing."""
        if prompt_tokens == 0:
            self.decode_step_s.append(seconds)
        elif prompt_tokens >= min(MIN_CHUNK_TOKENS, self.max_tokens):
            self.prompt_token_s.append(max(0.0, seconds - self.typical_decode_step_s) / prompt_tokens)

    def chunk_len(self, *, streaming: bool) -> int:
        """Tokens of prompts in the next step; streaming: somebody gets a token with each step."""
        allowed_s = self.max_gap_s
        if streaming and self.decode_step_s:
            allowed_s = min(allowed_s, max(UNNOTICED_GAP_S, self.max_slowdown * self.typical_decode_step_s))
        each_s = median(self.prompt_token_s) if self.prompt_token_s else 0.0
        if each_s == 0 or each_s * self.max_tokens <= allowed_s - self.typical_decode_step_s:
            return self.max_tokens
        return min(self.max_tokens, max(MIN_CHUNK_TOKENS, int((allowed_s - self.typical_decode_step_s) / each_s)))
