"""What follows from one round: rates of all streams together, and how much the model's steps read and computed.

Defined here because they concern several requests at once; those of one request are `metrics.py`'s.

decode      from the first token of the stream that begins last, to the last token of the one that ends first: in
            between every step brings each stream a token, or more with drafts
decode/s    tokens of all streams in that time, by it; of one stream that is its TPS
prefill/s   prompt tokens of all streams that were computed, by the time from the first scheduling to the last
            first token; of one stream that is its own prefill/s
steps       of decoding bring a token each, and those drafts that were right
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
    """The time in which all streams of a round are decoding."""

    tokens: int  # of all streams
    steps: int
    seconds: float
    shares: Step  # what each stream brings to a step, on average

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class PrefillPhase:
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
class StepWork:
    """What a step, or several, must read and compute."""

    steps: int
    bytes: float  # of all of them
    weight_bytes: float  # of these
    flops: float
    attention_flops: float  # of them, of tokens that are computed together; of a single one attention is reading
    tokens_per_step: int  # tokens of a step


def decode_phase(answers: Round) -> DecodePhase | None:
    """None where no two steps are common to all streams.

    Begin and end are tokens of one stream, the first to end: tokens of a step come out one after the other, and so
    every stream has as many steps in between.
    """
    last_begin = max(answer.times[0] for answer in answers)
    shortest = min(answers, key=lambda answer: answer.times[-1])
    marks = [t for t in step_times(shortest) if t >= last_begin]
    if len(marks) < 2:
        return None
    ranges = [tokens_in_interval(answer, marks[0], marks[-1]) for answer in answers]
    shares = []
    for answer, places in zip(answers, ranges, strict=True):
        m = answer.metrics
        drafts = round(m.draft_tokens / answer.steps)
        shares.append(SequenceStep(1 + drafts, m.prompt_tokens + (places.start + places.stop - 1) // 2 + drafts))
    return DecodePhase(sum(map(len, ranges)), len(marks) - 1, marks[-1] - marks[0], tuple(shares))


def step_times(answer: StreamResult) -> list[float]:
    """When each of its steps brought the first of its tokens."""
    return list(compress(answer.times, answer.begins_step))


def tokens_in_interval(answer: StreamResult, begin: float, end: float) -> range:
    """Those of the steps that came out after `begin`, the last of them at `end`, with all their drafts."""
    starts = list(compress(range(len(answer.begins_step)), answer.begins_step))
    times = step_times(answer)
    first, behind = (bisect.bisect_right(times, t) for t in (begin, end))
    return range(starts[first], starts[behind] if behind < len(starts) else len(answer.begins_step))


def prefill_phase(answers: Round) -> PrefillPhase:
    metrics = [answer.metrics for answer in answers]
    scheduled = min(answer.arrival + answer.metrics.queue_s for answer in answers)
    shares = tuple(SequenceStep(m.prompt_tokens - m.cached_tokens, m.prompt_tokens) for m in metrics)
    return PrefillPhase(shares, max(answer.times[0] for answer in answers) - scheduled)


def decode_work(
    phase: DecodePhase, config: ModelConfig, weights: WeightBytes, element_bytes: int, kv: tuple[int, int]
) -> StepWork:
    """Of one step. element_bytes, kv: as `bytes_read` takes them."""
    return step_work(phase.shares, 1, config, weights, element_bytes, kv)


def prefill_work(
    phase: PrefillPhase,
    config: ModelConfig,
    weights: WeightBytes,
    element_bytes: int,
    kv: tuple[int, int],
    chunk: int,
) -> StepWork:
    """Of all steps together, in which weights are read again for each `chunk` tokens."""
    return step_work(phase.shares, -(-phase.tokens // chunk), config, weights, element_bytes, kv)


def step_work(
    step: Step, times: int, config: ModelConfig, weights: WeightBytes, element_bytes: int, kv: tuple[int, int]
) -> StepWork:
    read = bytes_read(config, weights, step, element_bytes, kv)
    of_weights = read - bytes_read(config, WeightBytes(0, 0, 0, 0), step, element_bytes, kv)
    tokens = sum(share.tokens * share.sequences for share in step)
    return StepWork(
        steps=times,
        bytes=read + (times - 1) * of_weights,
        weight_bytes=times * of_weights,
        flops=flops(config, step),
        attention_flops=sum(
            mixer_flops(layer.mixer, share) * share.sequences
            for layer in config.layers
            for share in step
            if share.tokens > 1
        ),
        tokens_per_step=-(-tokens // times),
    )
