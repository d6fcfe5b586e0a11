"""How fast a model can answer: the roofline (Williams et al. 2009). A step takes as long as reading its bytes, or
as computing its products, whichever is more.

Knows no device but its two rates. With the rates that are published, or that a copy reaches, this is a ceiling;
with those that this machine reached in such steps, an expectation.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from localllm.arch.config import ModelConfig
from localllm.arch.cost import SequenceStep, Step, WeightBytes, bytes_read, flops
from localllm.plan.memory import TOKEN_BUDGET

MAX_STEPS = 32  # of a prompt that are looked at one by one


class DeviceRates(Protocol):
    """`Hardware` has them, and what was measured."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that are read."""
        ...

    @property
    def flops(self) -> float:
        """Multiplications and additions a second."""
        ...


@dataclass(frozen=True)
class Speed:
    """Times are seconds; rates are tokens a second of decoding."""

    ttft_s: float  # of the prompt, for a user who is alone
    first_tokens_per_s: float  # of one user, while the cache is empty
    tokens_per_s: float  # of one user, with the whole context in the cache
    all_tokens_per_s: float  # of all users together, each with the whole context
    users: int  # who those are
    bound: Literal["memory", "compute"]  # what all users' steps wait for


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
    kv: tuple[int, int] | None = None,
    chunk: int = TOKEN_BUDGET["cpu"],
) -> Speed:
    """context, prompt: in tokens; element_bytes, kv: as `bytes_read`; step_s: what each step takes besides; chunk:
    most tokens of a step."""

    def reading(step: Step) -> float:
        return bytes_read(config, weights, step, element_bytes, kv) / rates.bandwidth

    def computing(step: Step) -> float:
        return flops(config, step) / rates.flops

    def seconds(step: Step) -> float:
        return max(reading(step), computing(step)) + step_s

    together = (SequenceStep(1, context, sequences=users),)
    return Speed(
        ttft_s=sum(seconds(step) * times for step, times in prefill_steps(prompt, chunk)),
        first_tokens_per_s=1 / seconds((SequenceStep(1, 1),)),
        tokens_per_s=1 / seconds((SequenceStep(1, context),)),
        all_tokens_per_s=users / seconds(together),
        users=users,
        bound="memory" if reading(together) >= computing(together) else "compute",
    )


def prefill_steps(prompt: int, chunk: int) -> list[tuple[Step, float]]:
    """The steps that a prompt is computed in, and how many each of them stands for: of more than MOST_STEPS some
    that lie evenly, as their times grow evenly. Only the last gives logits."""
    count = -(-prompt // chunk)
    chosen = range(count)
    if count > MAX_STEPS:
        chosen = [i * (count - 1) // (MAX_STEPS - 1) for i in range(MAX_STEPS)]
    ends = [min(prompt, (i + 1) * chunk) for i in chosen]
    shares = [SequenceStep(end - i * chunk, end, int(end == prompt)) for i, end in zip(chosen, ends, strict=True)]
    return [((share,), count / len(chosen)) for share in shares]
