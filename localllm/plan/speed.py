"""Predicts speed by the roofline model (Williams et al. 2009): a step takes as long as reading its bytes or
computing its products, whichever is longer.

A device is represented by these two rates. With published rates, or those of a copy, the result is a ceiling; with
rates that this machine reached in such steps, an expectation.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.arch.cost import (
    SequenceStep,
    Step,
    WeightBytes,
    bytes_read,
    elements_read_per_token,
    expert_fraction_read,
    flops,
    token_count,
    vectors_read_per_token,
)
from localllm.metrics import StepReads
from localllm.plan.memory import TOKEN_BUDGET
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes

MAX_STEPS = 32  # of a prompt that are computed individually
# Shares of a device's published rates that steps are assumed to reach: those of a CPU's own rates that answers of
# a 1B model reached (`plan/measured.py`). An H100 read weights in bfloat16 at 0.75 of its rate, INT4 at 0.49
# (bench/NOTES.md).
ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE = 0.7, 0.55
ASSUMED_LAYER_S = 5e-6  # of a GPU's step, besides reading and computing: starts and ends of a layer's kernels


class DeviceRates(Protocol):
    """The rates of a device, like DeviceSpec and Expectation."""

    @property
    def bandwidth(self) -> float:
        """Bytes read per second."""
        ...

    @property
    def flops(self) -> float:
        """Floating-point operations per second."""
        ...


@dataclass(frozen=True)
class Speed:
    """Times are in seconds; rates are decoded tokens per second."""

    ttft_s: float  # of the prompt, for a single user
    first_tokens_per_s: float  # of a single user, with an empty cache
    tokens_per_s: float  # of a single user, at full context
    all_tokens_per_s: float  # of all users together, each at full context
    users: int  # number of users in the previous field
    bound: Literal["memory", "compute"]  # limit of all users' steps


def predict_speed(
    config: ModelConfig,
    weights: WeightBytes,
    element_bytes: int,
    rates: DeviceRates,
    *,
    context: int,
    prompt: int,
    users: int = 1,
    step_s: float = 0.0,
    kv: tuple[float, float] | None = None,
    chunk: int = TOKEN_BUDGET["cpu"],
    exchange_s: Callable[[int, int], float] = lambda tokens, logits: 0.0,
    expert_imbalance: Callable[[int], float] = lambda tokens: 1.0,
) -> Speed:
    """Predict speed. context, prompt: in tokens; element_bytes, kv: see `bytes_read`; step_s: additional time per
    step; chunk: maximum tokens per step; exchange_s: time of devices to exchange a step's tokens and logits;
    expert_imbalance: of the experts that a step's tokens select, how many times the mean the busiest device reads
    """

    def reading(step: Step) -> float:
        read, tokens = bytes_read(config, weights, step, element_bytes, kv), token_count(step)
        experts = weights.experts * expert_fraction_read(config, tokens)
        return (read + experts * (expert_imbalance(tokens) - 1)) / rates.bandwidth

    def computing(step: Step) -> float:
        return flops(config, step) / rates.flops

    def seconds(step: Step) -> float:
        logits = sum(share.logits * share.sequences for share in step)
        return max(reading(step), computing(step)) + step_s + exchange_s(token_count(step), logits)

    all_users = (SequenceStep(1, context, sequences=users),)
    return Speed(
        ttft_s=sum(seconds(step) * times for step, times in prefill_steps(prompt, chunk)),
        first_tokens_per_s=1 / seconds((SequenceStep(1, 1),)),
        tokens_per_s=1 / seconds((SequenceStep(1, context),)),
        all_tokens_per_s=users / seconds(all_users),
        users=users,
        bound="memory" if reading(all_users) >= computing(all_users) else "compute",
    )


def prefill_steps(prompt: int, chunk: int) -> list[tuple[Step, float]]:
    """Return the steps that compute a prompt, each with the number of steps that it represents.

    For more than MAX_STEPS, evenly spaced ones are chosen, because durations grow linearly. Only the last computes
    logits.
    """
    count = -(-prompt // chunk)
    indices = range(count)
    if count > MAX_STEPS:
        indices = [i * (count - 1) // (MAX_STEPS - 1) for i in range(MAX_STEPS)]
    ends = [min(prompt, (i + 1) * chunk) for i in indices]
    shares = [SequenceStep(end - i * chunk, end, int(end == prompt)) for i, end in zip(indices, ends, strict=True)]
    return [((share,), count / len(indices)) for share in shares]


def step_reads(
    config: ModelConfig,
    weights: WeightBytes,
    dtype: str,
    kv_dtype: str,
    kept_per_token: float,
    bandwidth: float | None,
) -> StepReads:
    """Return the bytes that a decode step of one request reads, with the experts that one token selects.

    A draft model is not included. bandwidth: measured, in bytes per second.
    """
    element, scale = kv_element_bytes(kv_dtype)
    sizes: Counter[int | None] = Counter()  # by a layer's window
    for mixer in (layer.mixer for layer in config.layers):
        window = mixer.window if isinstance(mixer, AttentionConfig) else None
        sizes[window] += int(elements_read_per_token(mixer) * element + vectors_read_per_token(mixer) * scale)
    return StepReads(
        weights=bytes_read(config, weights, (SequenceStep(1, 0),), ELEMENT_BYTES[dtype]),
        per_token=sizes[None],
        kept_per_token=kept_per_token,
        bandwidth=bandwidth,
        windows=tuple((window, size) for window, size in sizes.items() if window),
    )
