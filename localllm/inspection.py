"""What the engine did for one request, step by step, for whoever wants to watch: plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A token that could have come next."""

    token_id: int
    logprob: float  # natural logarithm, by the model's own distribution
    chance: float  # of being drawn, after penalties, temperature, top_k, top_p and min_p; 0: left out by them
    cut_by: str = ""  # what left it out first: `grammar`, `logit_bias`, `temperature`, `top_k`, `top_p`, `min_p`


@dataclass(frozen=True)
class StepReport:
    """One step, as far as it was this request's. Times are seconds since the request arrived.

    A request that waits brings no tokens: it is told of its place, when it comes and whenever that changes.
    """

    began_s: float
    ended_s: float
    tokens: int  # that the request brought to it: a piece of its prompt, or 1 and its draft tokens
    computed: int  # tokens of prompt and answer whose keys and values are in the cache after it
    blocks: int  # of the KV cache that the request holds after it
    found: int  # tokens of its prompt that were found in the cache
    running: int  # requests that the engine worked on, this among them
    waiting: int  # requests behind them
    drafts: tuple[int, ...] = ()  # token ids that it verified
    accepted: int = 0  # of these, the first so many were right
    candidates: tuple[tuple[Candidate, ...], ...] = ()  # of each token that came, itself among them
    place: int = 0  # in the queue, counted from 1; 0: it is being worked on
    prompt: int = 0  # tokens of its whole prompt


@dataclass(frozen=True)
class Slot:
    """A request that an engine has, for whoever looks at all of them. Numbers of different moments of one step."""

    id: int
    age_s: float  # since it arrived
    prompt_tokens: int
    found: int  # of them, in the cache
    computed: int  # tokens of prompt and answer whose keys and values are in the cache
    output_tokens: int
    blocks: int  # of the KV cache
    first_s: float | None  # since its first token came; None before
    waiting: bool  # it has not begun, or was put back

    @property
    def tokens_per_s(self) -> float | None:
        """Of its answer, up to now; None before there is a gap to tell by."""
        return (self.output_tokens - 1) / self.first_s if self.first_s and self.output_tokens > 1 else None


@dataclass(frozen=True)
class StepReads:
    """What a decode step of one request reads from memory, and how fast this machine reads: the roofline."""

    weights: float  # bytes a step, recurrent states among them
    per_token: float  # bytes a step for each token in the cache, of the layers that see all of them
    kept_per_token: float  # bytes that the cache keeps for each token
    bandwidth: float | None  # bytes a second, as measured; None where it was not
    windows: tuple[tuple[int, float], ...] = ()  # layers that see no more tokens, and bytes a step for each

    def bytes_per_step(self, context: float) -> float:
        """Bytes that a step reads with so many tokens in the cache."""
        windows = sum(size * min(window, context) for window, size in self.windows)
        return self.weights + self.per_token * context + windows

    def bandwidth_fraction(self, steps_per_s: float, context: float) -> float | None:
        """Of the measured bandwidth, what so many steps a second read with so many tokens in the cache."""
        return self.bytes_per_step(context) * steps_per_s / self.bandwidth if self.bandwidth else None
