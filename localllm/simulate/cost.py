"""The duration of a step by its shape: fitted to steps that were measured, or the roofline of a device.

Durations deviate from their mean. A fitted cost draws each step's deviation from those of measured steps of the
same kind, so that slow steps, and the latencies that they cause, occur as often as they did.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.arch.cost import (
    SequenceStep,
    WeightBytes,
    elements_read_per_token,
    expert_fraction_read,
    expert_imbalance,
    flops,
    mixer_flops,
    state_bytes,
    tokens_seen,
    vectors_read_per_token,
)
from localllm.errors import UsageError
from localllm.plan.parallel import Parallel
from localllm.plan.speed import DeviceRates
from localllm.runtime.step import StepShape

KINDS = ("decode", "mixed", "prefill")
MIN_STEPS_OF_KIND = 8  # measured steps from which a kind has coefficients of its own
MIN_STEPS = 32  # measured steps that a fit needs
HELD_OUT_SHARE = 5  # every fifth measured step is not fitted to
MIN_WAITS = 32  # of requests, from which their way to the engine is estimated
DRAWS = 2**14  # deviations that are drawn before they repeat
MIN_STEP_S = 1e-6
ONE_TOKEN = SequenceStep(1, 1, logits=0)

TimedStep = tuple[StepShape, float]  # and its seconds


class Cost(Protocol):
    """The cost of steps, with its origin and error."""

    source: str

    def seconds(self, shape: StepShape, number: int) -> float:
        """Return the duration of the step with this number."""
        ...

    def totals(self) -> tuple[float, float] | None:
        """Return the bytes read and the operations of all steps so far; None if they are not counted."""
        ...


@dataclass(frozen=True)
class FitError:
    """Error of predictions for measured steps that were not used in the fit."""

    steps: int
    median: float  # relative error of a single step
    total: float  # relative error of the sum of all


class FittedCost:
    """A linear function of the shape for each kind of step, by least squares of the relative error, times the
    deviation of a measured step of the kind."""

    def __init__(self, steps: Sequence[TimedStep], origin: str, seed: int = 0, *, deviations: bool = True):
        """origin: says where the steps are from; deviations: draw them, or use the mean alone.

        Raises UsageError for too few steps.
        """
        if len(steps) < MIN_STEPS:
            raise UsageError(
                f"{len(steps)} steps were measured, and a fit needs {MIN_STEPS}", "let it answer more requests"
            )
        order = random.Random(seed).sample(range(len(steps)), len(steps))
        held_out = [steps[i] for i in order[::HELD_OUT_SHARE]]
        fitted = [steps[i] for n, i in enumerate(order) if n % HELD_OUT_SHARE]
        self.coefficients = {kind: fit_kind(fitted, kind) for kind in KINDS}
        self.deviations = {
            kind: draw_deviations(fitted, kind, self.mean, seed) if deviations else array("d", [1.0])
            for kind in KINDS
        }
        self.error = self.measure_error(held_out)
        self.source = (
            f"fitted to {len(fitted)} steps {origin}; of {self.error.steps} others, a single one is off by "
            f"{self.error.median:.0%} (median), their sum by {self.error.total:+.1%}"
        )

    def mean(self, shape: StepShape) -> float:
        return max(MIN_STEP_S, sum(map(float.__mul__, self.coefficients[shape.kind], features(shape))))

    def seconds(self, shape: StepShape, number: int) -> float:
        if shape.prompts:
            deviations = self.deviations[shape.kind]
            return self.mean(shape) * deviations[number % len(deviations)]
        a, b, c, d = self.coefficients["decode"][:4]
        deviations = self.deviations["decode"]
        mean = a + b * shape.sequences + c * shape.tokens + d * shape.context
        return (mean if mean > MIN_STEP_S else MIN_STEP_S) * deviations[number % len(deviations)]

    def totals(self) -> None:
        return None

    def measure_error(self, steps: Sequence[TimedStep]) -> FitError:
        predicted = np.array([self.mean(shape) for shape, _ in steps])
        measured = np.array([seconds for _, seconds in steps])
        errors = np.abs(predicted / measured - 1)
        return FitError(len(steps), float(np.median(errors)), float(predicted.sum() / measured.sum() - 1))


def features(shape: StepShape) -> tuple[float, ...]:
    """Return what the duration is linear in."""
    return (
        1.0,
        float(shape.sequences),
        float(shape.tokens),
        float(shape.context),
        float(shape.prompts),
        float(shape.prompt_tokens),
        float(shape.prompt_context),
        float(shape.pairs),
    )


def fit_kind(steps: Sequence[TimedStep], kind: str) -> tuple[float, ...]:
    """Return the coefficients of one kind of step, or of all kinds together where it was measured too rarely."""
    own = [step for step in steps if step[0].kind == kind]
    chosen = own if len(own) >= MIN_STEPS_OF_KIND else steps
    x = np.array([features(shape) for shape, _ in chosen])
    y = np.array([seconds for _, seconds in chosen])
    # Slow steps are rare and do not decide the slopes; sums are then made right, because queues add durations up.
    weights = 1 / np.sqrt(y)
    coefficients = nonnegative_least_squares(x * weights[:, None], y * weights)
    return tuple((coefficients * (y.sum() / (x @ coefficients).sum())).tolist())


def nonnegative_least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return coefficients of which none is negative, so that no step gets shorter by more work.

    Drops the most negative coefficient until there is none. Columns that are multiples of each other share one.
    """
    scale = np.abs(x).max(axis=0)
    active = [i for i in range(x.shape[1]) if scale[i] > 0]
    result = np.zeros(x.shape[1])
    while active:
        solution, *_ = np.linalg.lstsq(x[:, active] / scale[active], y, rcond=1e-6)
        lowest = int(np.argmin(solution))
        if solution[lowest] >= 0:
            result[active] = solution / scale[active]
            break
        del active[lowest]
    return result


def draw_deviations(
    steps: Sequence[TimedStep], kind: str, mean: Callable[[StepShape], float], seed: int
) -> "array[float]":
    """Return measured durations over predicted ones, drawn from steps of a kind, with the mean that keeps sums
    right."""
    own = [step for step in steps if step[0].kind == kind]
    own = own if len(own) >= MIN_STEPS_OF_KIND else list(steps)
    predicted = np.array([mean(shape) for shape, _ in own])
    measured = np.array([seconds for _, seconds in own])
    ratios = measured / predicted
    drawn = np.random.default_rng([seed, KINDS.index(kind)]).choice(ratios, DRAWS)
    return array("d", (drawn * measured.sum() / (predicted.sum() * drawn.mean())).tolist())


def entry_delay(waits: Sequence[float]) -> float:
    """Return the seconds that a request takes to reach its engine, in addition to the rest of the running step.

    Returns 0 for too few waits. waits: from arrivals until the busy engine received them, less half of a step
    """
    return max(0.0, float(np.median(waits))) if len(waits) >= MIN_WAITS else 0.0


class RooflineCost:
    """The time to read a step's bytes or to compute its products, whichever is longer, at the rates of a device:
    of products with weights, and then of attention, plus a time per step and per sequence.

    The sequences of a step count as equally long: sums over them suffice. Deviations from the mean are not
    known, so there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightBytes,
        element_bytes: int,
        kv: tuple[float, float],
        rates: DeviceRates,
        source: str,
        step_s: float = 0.0,
        sequence_s: float = 0.0,
    ):
        """rates: those that steps reach; element_bytes, kv: as in `bytes_read`; step_s, sequence_s: additional
        time per step, and per sequence of it."""
        self.config, self.weights, self.element_bytes = config, weights, element_bytes
        self.rates, self.source, self.step_s = rates, source, step_s
        self.sequence_s = sequence_s
        self.bytes_read = self.operations = 0.0  # of all steps so far
        element, scale = kv
        counts = Counter(layer.mixer for layer in config.layers)
        self.mixers = [  # with the bytes of a cached token in all layers that are alike
            (c, count, count * (elements_read_per_token(c) * element + vectors_read_per_token(c) * scale))
            for c, count in counts.items()
        ]
        self.state_bytes = state_bytes(config, element_bytes)
        pairs = sum(count * mixer_flops(c, ONE_TOKEN) for c, count in counts.items())
        self.operations_per_token = flops(config, (ONE_TOKEN,)) - pairs
        self.operations_per_logit = flops(config, (replace(ONE_TOKEN, logits=1),)) - flops(config, (ONE_TOKEN,))
        self.is_linear = all(isinstance(c, AttentionConfig) and not c.window for c in counts)
        # By sequences and tokens of a step that decodes: bytes and operations of its products, and those of its
        # attention without context, and per context.
        self.lines: dict[tuple[int, int], tuple[float, ...]] = {}
        self.waits: dict[int, float] = {}  # bytes of `waited_bytes`, by tokens

    def totals(self) -> tuple[float, float]:
        return self.bytes_read, self.operations

    def work(self, shape: StepShape) -> tuple[float, float, float, float]:
        """Return the bytes that a step reads and its operations: of products with weights, and of attention."""
        shares: list[SequenceStep] = []
        if shape.sequences:
            each = max(1, shape.tokens // shape.sequences)
            shares.append(SequenceStep(each, max(each, shape.context // shape.sequences), 1, shape.sequences))
        if shape.prompts:
            each = max(1, shape.prompt_tokens // shape.prompts)
            shares.append(SequenceStep(each, max(each, shape.prompt_context // shape.prompts), 1, shape.prompts))
        tokens, sequences = shape.tokens + shape.prompt_tokens, shape.sequences + shape.prompts
        read = self.weights.layers + self.weights.head
        if self.weights.experts:
            read += self.weights.experts * expert_fraction_read(self.config, tokens)
        computed = self.operations_per_token * tokens + self.operations_per_logit * sequences
        state_read, state_computed = float(self.state_bytes * sequences), 0.0
        for share in shares:
            for c, count, token_bytes in self.mixers:
                state_read += token_bytes * tokens_seen(c, share) * share.sequences
                state_computed += count * mixer_flops(c, share) * share.sequences
        return float(read), float(computed), state_read, state_computed

    def waited_bytes(self, shape: StepShape) -> float:
        """Return how many bytes the devices could read while they wait for each other."""
        return 0.0

    def decode_line(self, sequences: int, tokens: int) -> tuple[float, ...]:
        """Return the work of a step that decodes, its attention as lines over the sum of contexts."""
        contexts = (sequences * 1024, sequences * 2048)
        (read, computed, state_read, state_computed), (_, _, more_read, more_computed) = (
            self.work(StepShape(sequences, tokens, context, 0, 0, 0, 0)) for context in contexts
        )
        run = contexts[1] - contexts[0]
        bytes_slope, operations_slope = (more_read - state_read) / run, (more_computed - state_computed) / run
        line = (
            read,
            computed,
            state_read - bytes_slope * contexts[0],
            bytes_slope,
            state_computed - operations_slope * contexts[0],
            operations_slope,
        )
        self.lines[sequences, tokens] = line
        return line

    def seconds(self, shape: StepShape, number: int) -> float:
        if self.is_linear and not shape.prompts:
            key = shape.sequences, shape.tokens
            line = self.lines.get(key) or self.decode_line(*key)
            read, computed = line[0], line[1]
            state_read, state_computed = line[2] + line[3] * shape.context, line[4] + line[5] * shape.context
        else:
            read, computed, state_read, state_computed = self.work(shape)
        self.bytes_read += read + state_read
        self.operations += computed + state_computed
        bandwidth, flops = self.rates.bandwidth, self.rates.flops
        by_memory, by_compute = (read + self.waited_bytes(shape)) / bandwidth, computed / flops
        state_by_memory, state_by_compute = state_read / bandwidth, state_computed / flops
        return (
            (by_memory if by_memory > by_compute else by_compute)
            + (state_by_memory if state_by_memory > state_by_compute else state_by_compute)
            + self.step_s
            + self.sequence_s * (shape.sequences + shape.prompts)
        )


class ParallelCost(RooflineCost):
    """A roofline with the time that devices exchange activations, and wait for the one with most experts."""

    parallel = Parallel()

    def waited_bytes(self, shape: StepShape) -> float:
        if not self.parallel.whole_experts:
            return 0.0
        tokens = shape.tokens + shape.prompt_tokens
        if (waited := self.waits.get(tokens)) is None:
            experts = self.weights.experts * expert_fraction_read(self.config, tokens)
            waited = experts * (expert_imbalance(self.config, tokens, self.parallel.tensor) - 1)
            self.waits[tokens] = waited
        return waited

    def seconds(self, shape: StepShape, number: int) -> float:
        tokens, sequences = shape.tokens + shape.prompt_tokens, shape.sequences + shape.prompts
        return super().seconds(shape, number) + self.parallel.exchange_s(self.config, tokens, sequences)


class ScaledCost:
    """Another cost times a factor."""

    def __init__(self, cost: Cost, factor: float):
        self.cost, self.factor, self.source = cost, factor, cost.source

    def seconds(self, shape: StepShape, number: int) -> float:
        return self.factor * self.cost.seconds(shape, number)

    def totals(self) -> tuple[float, float] | None:
        return self.cost.totals()
