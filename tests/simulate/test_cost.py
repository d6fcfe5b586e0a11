"""Costs of steps: fits find what steps were made from, and the roofline is that of the plan."""

import bisect
import random
import statistics
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, flops
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.errors import UsageError
from localllm.runtime.step import StepShape
from localllm.simulate.cost import FittedCost, RooflineCost, entry_delay, nonnegative_least_squares, why_not_fitted
from tests.models.families import FAMILIES
from tests.plan.published import LLAMA_8B, header_of
from tests.tiny import make_checkpoint


def shapes(count: int, seed: int = 0) -> list[StepShape]:
    rng, found = random.Random(seed), []
    for _ in range(count):
        sequences = rng.randint(0, 20)
        prompts = rng.choice((0, 0, 1, 2)) if sequences else 1
        context = sum(rng.randint(10, 900) for _ in range(sequences))
        tokens = prompts * rng.randint(10, 250)
        found.append(StepShape(sequences, sequences, context, prompts, tokens, 2 * tokens, tokens * tokens))
    return found


def true_seconds(s: StepShape) -> float:
    base = {"decode": 2e-3, "mixed": 4e-3, "prefill": 3e-3}[s.kind]
    return base + 1e-4 * s.sequences + 2e-7 * s.context + 5e-5 * s.prompt_tokens + 1e-9 * s.pairs


def test_fit_without_noise_is_exact() -> None:
    cost = FittedCost([(shape, true_seconds(shape)) for shape in shapes(600)], "made up", deviations=False)
    assert cost.error.median < 0.01 and abs(cost.error.total) < 0.005
    for shape in shapes(50, seed=9):
        assert cost.seconds(shape, 0) == pytest.approx(true_seconds(shape), rel=0.02)
    assert "of 120 others" in cost.source


def test_deviations_have_the_tails_of_the_measured_steps() -> None:
    """Steps of one kind vary as the measured ones did, and their sum is right."""
    rng = random.Random(4)
    steps = [
        (s, true_seconds(s) * (5.0 if rng.random() < 0.02 else rng.lognormvariate(0, 0.1))) for s in shapes(4000)
    ]
    cost = FittedCost(steps, "made up")
    shape = StepShape(8, 8, 3000, 0, 0, 0, 0)
    drawn = [cost.seconds(shape, number) for number in range(10_000)]
    assert max(drawn) / statistics.median(drawn) > 4
    slow = 3 * statistics.median(drawn)
    share = sum(seconds > slow for seconds in drawn) / len(drawn)
    assert share == pytest.approx(0.02, abs=0.01)
    mean_factor = 0.02 * 5 + 0.98 * np.exp(0.005)
    assert statistics.fmean(drawn) == pytest.approx(true_seconds(shape) * mean_factor, rel=0.05)
    assert drawn[:5] == [cost.seconds(shape, number) for number in range(5)]  # reproducible


def test_coefficients_are_not_negative() -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(200), rng.random((200, 3))])
    fitted = nonnegative_least_squares(x, x @ np.array([1.0, 2.0, -0.5, 0.0]) + 0.01 * rng.standard_normal(200))
    assert (fitted >= 0).all() and fitted[1] == pytest.approx(2, abs=0.1) and fitted[2] == 0


def test_too_few_steps() -> None:
    with pytest.raises(UsageError, match="31 steps were measured"):
        FittedCost([(shape, 0.01) for shape in shapes(31)], "made up")


def decode_steps(sequences: int, count: int = 40, drafts: int = 0) -> list[StepShape]:
    return [StepShape(sequences, sequences * (1 + drafts), 100 * sequences + n, 0, 0, 0, 0) for n in range(count)]


def prefill_steps(tokens: int, count: int = 5) -> list[StepShape]:
    return [StepShape(0, 0, 0, 1, tokens, tokens, tokens * tokens // 2)] * count


@pytest.mark.parametrize(
    ("recorded", "drafts", "reason"),
    [
        ([], False, "no step of demo was measured"),
        (decode_steps(1, 20), False, "only 20 steps of demo were recorded"),
        (
            decode_steps(1) + prefill_steps(512),
            False,
            "the 40 recorded decode steps of demo are of one sequence at",
        ),
        (
            decode_steps(1) + decode_steps(3),
            False,
            "the 80 recorded decode steps of demo are of at most 3 sequences",
        ),
        (
            decode_steps(1) + decode_steps(32, 3),
            False,
            "the 43 recorded decode steps of demo are of one sequence at",
        ),
        (decode_steps(8) + decode_steps(16), False, "the 80 recorded decode steps of demo are of at least 8 seq"),
        (
            decode_steps(1) + decode_steps(8),
            False,
            "hardly any of the 80 recorded steps of demo computes a prompt",
        ),
        (
            decode_steps(1) + decode_steps(8) + prefill_steps(512, 9),
            False,
            "the 89 recorded steps of demo compute similar numbers of prompt tokens",
        ),
        (
            decode_steps(1) + decode_steps(8),
            True,
            "hardly any of the 80 recorded decode steps of demo decodes with",
        ),
        (decode_steps(8, drafts=4), False, "hardly any of the 40 recorded decode steps of demo decodes without"),
        (
            prefill_steps(64, 20) + prefill_steps(512, 20),
            False,
            "hardly any of the 40 recorded steps of demo decodes",
        ),
    ],
)
def test_steps_that_do_not_determine_a_fit(recorded: list[StepShape], drafts: bool, reason: str) -> None:
    found = why_not_fitted([(shape, true_seconds(shape)) for shape in recorded], "demo", drafts=drafts)
    assert found and found.startswith(reason)


def test_steps_that_determine_a_fit() -> None:
    """Those of `bench --prompt 64,512 --batch 1,8`, and those of a server."""
    bench = [*decode_steps(1), *decode_steps(8), *prefill_steps(64), *prefill_steps(512)]
    for recorded in (bench, shapes(600)):
        assert why_not_fitted([(s, true_seconds(s)) for s in recorded], "demo", drafts=False) is None
    drafted = decode_steps(1, drafts=4) + decode_steps(8, drafts=4)
    assert why_not_fitted([(s, true_seconds(s)) for s in bench + drafted], "demo", drafts=True) is None


class Rates:
    bandwidth, flops = 1e12, 1e14


def roofline(config, weights) -> RooflineCost:
    return RooflineCost(config, weights, 2, (2, 0), Rates, "made up")


def test_roofline_counts_as_the_plan_does() -> None:
    config = parse_config(header_of(LLAMA_8B).config)
    weights = WeightBytes(14_000_000_000, 0, 1_000_000_000, 1_000_000_000)
    cost = roofline(config, weights)
    for decoding, prompts in (((1, 500), None), ((7, 900), None), ((3, 64), (2, 200, 700)), (None, (1, 512, 512))):
        shares = []
        if decoding:
            shares.append(SequenceStep(1, decoding[1], 1, decoding[0]))
        if prompts:
            shares.append(SequenceStep(prompts[1], prompts[2], 1, prompts[0]))
        sequences, context = decoding or (0, 0)
        count, tokens, end = prompts or (0, 0, 0)
        shape = StepShape(sequences, sequences, sequences * context, count, count * tokens, count * end, 0)
        read, computed, cache_read, cache_computed = cost.work(shape)
        assert read + cache_read == bytes_read(config, weights, tuple(shares), 2, (2, 0))
        assert computed + cache_computed == flops(config, tuple(shares))
        expected = max(read / 1e12, computed / 1e14) + max(cache_read / 1e12, cache_computed / 1e14)
        assert cost.seconds(shape, 0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", ["Gemma 3", "Mixtral", "Qwen3-Next", "DeepSeek-V3"])
def test_roofline_of_other_layers(tmp_path: Path, family: str) -> None:
    """Windows, experts, recurrent states and latents."""
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    config = parse_config(read_header(tmp_path).config)
    weights = WeightBytes(1_000_000, 500_000, 100_000, 100_000)
    shares = (SequenceStep(1, 300, 1, 4), SequenceStep(20, 50, 1, 1))
    read, computed, state_read, state_computed = roofline(config, weights).work(
        StepShape(4, 4, 1200, 1, 20, 50, 0)
    )
    assert read + state_read == pytest.approx(bytes_read(config, weights, shares, 2, (2, 0)), abs=1)
    assert computed + state_computed == flops(config, shares)


def test_overheads_of_a_roofline() -> None:
    """Attention follows the products, so that the one's reading does not hide behind the other's arithmetic; each
    sequence adds its own time."""
    config = parse_config(header_of(LLAMA_8B).config)
    weights = WeightBytes(14_000_000_000, 0, 1_000_000_000, 1_000_000_000)
    shape = StepShape(200, 200, 200 * 4000, 0, 0, 0, 0)

    class SlowRates:
        bandwidth, flops = 1e12, 1e13  # 200 rows of products are bound by arithmetic, attention by memory

    plain = RooflineCost(config, weights, 2, (2, 0), SlowRates, "made up")
    read, computed, cache_read, _ = plain.work(shape)
    assert read / 1e12 < computed / 1e13
    assert plain.seconds(shape, 0) == pytest.approx(computed / 1e13 + cache_read / 1e12)
    more = RooflineCost(config, weights, 2, (2, 0), SlowRates, "made up", 0.5, 0.01)
    assert more.seconds(shape, 0) - plain.seconds(shape, 0) == pytest.approx(0.5 + 200 * 0.01)


def test_entry_delay() -> None:
    """Requests that arrive at random during steps, and are received at the next end of one, 1 ms later or more."""
    rng = random.Random(0)
    steps = [(StepShape(1, 1, 10, 0, 0, 0, 0), rng.choice((0.002, 0.010))) for _ in range(4000)]
    ends = list(accumulate(seconds for _, seconds in steps))
    arrivals = [rng.uniform(0, ends[-1] - 1) for _ in range(2000)]
    received = [bisect.bisect_left(ends, at + 0.001) for at in arrivals]
    waits = [ends[i] - at - steps[i][1] / 2 for i, at in zip(received, arrivals, strict=True)]
    assert entry_delay(waits) == pytest.approx(0.001, rel=0.2)
    assert entry_delay(waits[:10]) == 0
