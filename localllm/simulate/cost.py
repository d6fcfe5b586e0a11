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
# What steps must cover for a fit of them to predict others. A coefficient that they do not determine would share
# the duration with the constant arbitrarily, and be multiplied by the sequences or tokens of larger steps.
MIN_REPEATS = 4  # steps that a number of sequences or prompt tokens is measured by; `bench` has 5 rounds
MIN_SPREAD = 4  # ratio of the largest such number to the smallest
MIN_BATCH = 8  # sequences: an engine runs dozens, to which fewer would be extrapolated by more than an order
# Error of a fit on held-out steps beyond which the roofline is no worse: it was a third off for steps of `demo`.
MAX_TOTAL_ERROR = 1 / 3
MAX_STEP_ERROR = 0.5  # median; a fit that misses half of the steps by more does not describe them
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

    @property
    def is_acceptable(self) -> bool:
        return self.median <= MAX_STEP_ERROR and abs(self.total) <= MAX_TOTAL_ERROR

    def __str__(self) -> str:
        return f"a single one is off by {self.median:.0%} (median), their sum by {self.total:+.1%}"


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
        most = max(shape.sequences for shape, _ in fitted)
        batches = f" of up to {most} sequences" if most > 1 else ""
        self.source = (
            f"fitted to {len(fitted)} steps{batches} {origin}; of {self.error.steps} others, {self.error}"
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


def steps_of_kind(steps: Sequence[TimedStep], kind: str) -> Sequence[TimedStep]:
    """Return the steps of a kind, or all where it was measured too rarely."""
    own = [step for step in steps if step[0].kind == kind]
    return own if len(own) >= MIN_STEPS_OF_KIND else steps


def why_not_fitted(steps: Sequence[TimedStep], model: str, *, drafts: bool) -> str | None:
    """Return why the steps of a model do not determine all coefficients of a fit, None if they do.

    drafts: whether sequences that decode have drafts in what is predicted
    """
    if len(steps) < MIN_STEPS:
        return f"only {len(steps)} steps of {model} were recorded" if steps else f"no step of {model} was measured"
    for kind in KINDS:
        chosen = steps_of_kind(steps, kind)
        shapes = [shape for shape, _ in chosen]
        which = "" if chosen is steps else f" {kind}"
        subject = f"the {len(shapes)} recorded{which} steps of {model}"
        if kind != "prefill":
            batches = [s.sequences for s in shapes if s.sequences and drafts == (s.tokens > s.sequences)]
            fewest, most = measured_range(batches)
            if not most:
                return f"hardly any of {subject} decodes {'with' if drafts else 'without'} drafts"
            if most < MIN_BATCH:
                return f"{subject} are of {f'at most {most} sequences' if most > 1 else 'one sequence'} at a time"
            if most < MIN_SPREAD * fewest:
                return f"{subject} are of at least {fewest} sequences at a time"
        if kind != "decode":
            least, largest = measured_range([s.prompt_tokens for s in shapes if s.prompts])
            if not largest:
                return f"hardly any of {subject} computes a prompt"
            if largest < MIN_SPREAD * least:
                return f"{subject} compute similar numbers of prompt tokens"
    return None


def measured_range(values: Sequence[int]) -> tuple[int, int]:
    """Return bounds beyond each of which too few of the values are for a measurement; zeros for too few values."""
    if len(values) < MIN_REPEATS:
        return 0, 0
    ordered = sorted(values)
    return ordered[MIN_REPEATS - 1], ordered[-MIN_REPEATS]


def fit_kind(steps: Sequence[TimedStep], kind: str) -> tuple[float, ...]:
    """Return the coefficients of one kind of step, or of all kinds together where it was measured too rarely."""
    chosen = steps_of_kind(steps, kind)
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
    own = steps_of_kind(steps, kind)
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
