"""Derives rates of all streams together from one round, and how much the model's steps read and computed.

Defined here because they involve several requests at once; those of one request are defined in `metrics.py`.

decode      from the first token of the stream that begins last, to the last token of the one that ends first:
            meanwhile every step produces a token, or more with drafts, for each stream
decode/s    tokens of all streams during that time, divided by it; for one stream that is its TPS
prefill/s   computed prompt tokens of all streams, divided by the time from the first scheduling to the last first
            token; for one stream that is its own prefill/s
steps       each decoding step produces a token, and any accepted drafts
"""

import bisect
import math
from dataclasses import dataclass
from itertools import compress

from localllm.arch.config import ModelConfig
from localllm.arch.cost import SequenceStep, Step, WeightBytes, bytes_read, flops, mixer_flops
from localllm.benchmark.measure import Round, StreamResult


@dataclass(frozen=True)
class DecodePhase:
    """The time during which all streams of a round are decoding."""

    tokens: int  # of all streams
    steps: int
    seconds: float
    shares: Step  # average contribution of each stream to a step

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class PrefillPhase:
    """The prefill phase of a round: from its first scheduling to the last first token."""

    shares: Step  # tokens that each stream computed
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True)
class StepWork:
    """Bytes and operations that one or several steps require."""

    steps: int
    bytes: float  # read by all steps
    weight_bytes: float  # of these, for weights
    flops: float
    # The part of `flops` for attention of tokens computed together; for a single token, attention is limited by
    # reading.
    attention_flops: float
    tokens_per_step: int  # per step


def decode_phase(answers: Round) -> DecodePhase | None:
    """Return None if no two steps are common to all streams.

    Begin and end are tokens of one stream, the first to end: the tokens of a step are output in order, so every
    stream has the same number of steps in between.
    """
    latest_begin = max(answer.times[0] for answer in answers)
    shortest = min(answers, key=lambda answer: answer.times[-1])
    marks = [t for t in step_times(shortest) if t >= latest_begin]
    if len(marks) < 2:
        return None
    ranges = [tokens_in_interval(answer, marks[0], marks[-1]) for answer in answers]
    shares = []
    for answer, indices in zip(answers, ranges, strict=True):
        metrics = answer.metrics
        drafts = round(metrics.draft_tokens / answer.steps)
        shares.append(
            SequenceStep(1 + drafts, metrics.prompt_tokens + (indices.start + indices.stop - 1) // 2 + drafts)
        )
    return DecodePhase(sum(map(len, ranges)), len(marks) - 1, marks[-1] - marks[0], tuple(shares))


def step_times(answer: StreamResult) -> list[float]:
    """Return when the first token of each step was output."""
    return list(compress(answer.times, answer.begins_step))


def tokens_in_interval(answer: StreamResult, begin: float, end: float) -> range:
    """Return indices of the tokens of steps after `begin` up to `end`, including all accepted drafts."""
    starts = list(compress(range(len(answer.begins_step)), answer.begins_step))
    times = step_times(answer)
    first, after = (bisect.bisect_right(times, t) for t in (begin, end))
    return range(starts[first], starts[after] if after < len(starts) else len(answer.begins_step))


def prefill_phase(answers: Round) -> PrefillPhase:
    metrics = [answer.metrics for answer in answers]
    scheduled = min(answer.arrival + answer.metrics.queue_s for answer in answers)
    shares = tuple(SequenceStep(m.prompt_tokens - m.cached_tokens, m.prompt_tokens) for m in metrics)
    return PrefillPhase(shares, max(answer.times[0] for answer in answers) - scheduled)


def decode_work(
    phase: DecodePhase, config: ModelConfig, weights: WeightBytes, element_bytes: int, kv: tuple[float, float]
) -> StepWork:
    """Return the work of one step. element_bytes, kv: as for `bytes_read`."""
    return step_work(phase.shares, 1, config, weights, element_bytes, kv)


def prefill_work(
    phase: PrefillPhase,
    config: ModelConfig,
    weights: WeightBytes,
    element_bytes: int,
    kv: tuple[float, float],
    chunk: int,
) -> StepWork:
    """Return the work of all steps together; each reads the weights again for up to `chunk` tokens."""
    return step_work(phase.shares, -(-phase.tokens // chunk), config, weights, element_bytes, kv)


def step_work(
    step: Step, steps: int, config: ModelConfig, weights: WeightBytes, element_bytes: int, kv: tuple[float, float]
) -> StepWork:
    read = bytes_read(config, weights, step, element_bytes, kv)
    weight_bytes = read - bytes_read(config, WeightBytes(0, 0, 0, 0), step, element_bytes, kv)
    tokens = sum(share.tokens * share.sequences for share in step)
    return StepWork(
        steps=steps,
        bytes=read + (steps - 1) * weight_bytes,
        weight_bytes=steps * weight_bytes,
        flops=flops(config, step),
        attention_flops=sum(
            mixer_flops(layer.mixer, share) * share.sequences
            for layer in config.layers
            for share in step
            if share.tokens > 1
        ),
        tokens_per_step=-(-tokens // steps),
    )
