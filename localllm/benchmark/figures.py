"""What follows from one round: rates of all streams together, and how much the model's steps read and computed.

Defined here because they concern several requests at once; those of one request are `metrics.py`'s.

decode      from the first token of the stream that begins last, to the last token of the one that ends first: in
            between every step brings each stream a token, or more with drafts
decode/s    tokens of all streams in that time, by it; of one stream that is its TPS
prefill/s   prompt tokens of all streams that were computed, by the time from the first scheduling to the last
            first token; of one stream that is its own prefill/s
steps       of decoding: a token each, those aside that came of accepted drafts
"""

import bisect
import itertools
import math
from dataclasses import dataclass

from localllm.arch.config import ModelConfig
from localllm.arch.cost import Share, Step, WeightBytes, bytes_read, flops, mixing_flops
from localllm.benchmark.measure import Round
from localllm.metrics import Metrics


@dataclass(frozen=True)
class Decoding:
    """The time in which all streams of a round are decoding."""

    tokens: int  # of all streams
    steps: float
    seconds: float
    contexts: tuple[int, ...]  # of each stream, on average over the steps: tokens that a step sees

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps if self.steps > 0 else math.nan


@dataclass(frozen=True)
class Prefill:
    """From the first scheduling of a round to the last first token."""

    shares: Step  # what each stream computed
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True)
class Work:
    """What a step, or several, must read and compute."""

    steps: int
    bytes: float  # of all of them
    weight_bytes: float  # of these
    flops: float
    attention_flops: float  # of them, of tokens that are computed together; of a single one attention is reading
    rows: int  # tokens of a step


def token_times(round: Round) -> list[list[float]]:
    """When each token of each stream came out."""
    firsts = [arrival + m.ttft_s for arrival, m in zip(round.arrivals, round.metrics, strict=True)]
    return [
        list(itertools.accumulate(m.itl_s, initial=first)) for first, m in zip(firsts, round.metrics, strict=True)
    ]


def decoding(round: Round) -> Decoding | None:
    """None where no two steps are common to all streams.

    Begin and end are tokens of one stream, the first to end: tokens of a step come out one after the other, and so
    each stream has as many tokens in between.
    """
    times = token_times(round)
    last_begin = max(stream[0] for stream in times)
    shortest = min(range(len(times)), key=lambda i: times[i][-1])
    marks = [t for t in times[shortest] if t >= last_begin]
    if len(marks) < 2:
        return None
    places = [(bisect.bisect_right(stream, marks[0]), bisect.bisect_right(stream, marks[-1])) for stream in times]
    m = round.metrics[shortest]
    return Decoding(
        tokens=sum(end - begin for begin, end in places),
        steps=(len(marks) - 1) * steps_of(m) / (m.output_tokens - 1),
        seconds=marks[-1] - marks[0],
        contexts=tuple(
            one.prompt_tokens + (begin + end - 1) // 2
            for one, (begin, end) in zip(round.metrics, places, strict=True)
        ),
    )


def steps_of(metrics: Metrics) -> int:
    """Of decoding: the first token is the prefill's."""
    return metrics.output_tokens - 1


def prefill(round: Round) -> Prefill:
    scheduled = [arrival + m.queue_s for arrival, m in zip(round.arrivals, round.metrics, strict=True)]
    shares = tuple(Share(m.prompt_tokens - m.cached_tokens, m.prompt_tokens) for m in round.metrics)
    return Prefill(shares, max(stream[0] for stream in token_times(round)) - min(scheduled))


def work_of_decoding(
    found: Decoding, config: ModelConfig, weights: WeightBytes, element_bytes: int, kv: tuple[int, int]
) -> Work:
    """Of one step. element_bytes, kv: as `bytes_read` takes them."""
    step = tuple(Share(1, context) for context in found.contexts)
    return work(step, 1, config, weights, element_bytes, kv)


def work_of_prefill(
    found: Prefill,
    config: ModelConfig,
    weights: WeightBytes,
    element_bytes: int,
    kv: tuple[int, int],
    chunk: int,
) -> Work:
    """Of all steps together, in which weights are read again for each `chunk` tokens."""
    return work(found.shares, -(-found.tokens // chunk), config, weights, element_bytes, kv)


def work(
    step: Step, times: int, config: ModelConfig, weights: WeightBytes, element_bytes: int, kv: tuple[int, int]
) -> Work:
    read = bytes_read(config, weights, step, element_bytes, kv)
    of_weights = read - bytes_read(config, WeightBytes(0, 0, 0, 0), step, element_bytes, kv)
    tokens = sum(share.tokens * share.sequences for share in step)
    return Work(
        steps=times,
        bytes=read + (times - 1) * of_weights,
        weight_bytes=times * of_weights,
        flops=flops(config, step),
        attention_flops=sum(
            mixing_flops(layer.mixer, share) * share.sequences
            for layer in config.layers
            for share in step
            if share.tokens > 1
        ),
        rows=-(-tokens // times),
    )
