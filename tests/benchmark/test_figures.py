"""Rates of concurrent streams against an engine simulated step by step; bytes and operations are counted."""

import random
from itertools import pairwise

import pytest

from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, flops
from localllm.arch.describe import parse_config
from localllm.benchmark import figures
from localllm.benchmark.measure import Round, StreamResult
from localllm.metrics import Metrics
from tests.plan.published import LLAMA_1B

CONFIG = parse_config(LLAMA_1B)
WEIGHTS = WeightBytes(layers=1_000_000, experts=0, head=300_000, tables=50_000)
BF16 = (2, (2, 0))
DELIVERY = 1e-5  # seconds between tokens of one step


def answer(
    arrival: float, tokens: list[tuple[float, bool]], prompt: int, drafts: int, cached: int = 0
) -> StreamResult:
    """tokens: time of each token, and whether a step was run for it."""
    times = [time for time, _ in tokens]
    metrics = Metrics(
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=len(times),
        queue_s=0.0,
        load_s=0.0,
        prefill_s=times[0] - arrival,
        ttft_s=times[0] - arrival,
        itl_s=tuple(b - a for a, b in pairwise(times)),
        e2e_s=times[-1] - arrival,
        peak_bytes=1,
        draft_tokens=drafts,
        accepted_tokens=sum(not begins for _, begins in tokens),
    )
    return StreamResult(arrival, metrics, tuple(begins for _, begins in tokens))


def simulate(drawn: random.Random, streams: int, output: int, accepted: float) -> tuple[Round, list[float]]:
    """Simulate streams that begin in successive steps and then share each step; return them with the end of each
    step. Each stream has one draft token per step, which is accepted with the probability `accepted`.
    """
    came: list[list[tuple[float, bool]]] = [[] for _ in range(streams)]
    now, ends, step = 0.0, [], 0
    while any(len(tokens) < output for tokens in came):
        now += drawn.uniform(0.05, 0.2)
        ends.append(now)
        for place, tokens in enumerate(came):
            if place <= step and len(tokens) < output:
                tokens.append((now + place * DELIVERY, True))
                if step > place and len(tokens) < output and drawn.random() < accepted:
                    tokens.append((now + place * DELIVERY + DELIVERY / 2, False))
        step += 1
    return tuple(answer(0.0, t, 100, (sum(b for _, b in t) - 1) * (accepted > 0)) for t in came), ends


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_without_drafts_every_step_brings_a_token_a_stream(streams: int, seed: int) -> None:
    answers, ends = simulate(random.Random(seed), streams, 12, 0.0)
    found = figures.decode_phase(answers)
    assert found
    assert found.tokens == streams * found.steps
    # From the step in which the last begins, or the one behind it, to the one in which the first has ended.
    begin = ends[streams - 1] if streams == 1 else ends[streams]
    assert found.seconds == pytest.approx(ends[11] - begin, abs=1e-4)
    assert found.steps == (11 if streams == 1 else 11 - streams)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_drafts_bring_tokens_and_no_steps(streams: int, seed: int) -> None:
    answers, ends = simulate(random.Random(seed), streams, 40, 0.6)
    found = figures.decode_phase(answers)
    assert found
    marks = [i for i, end in enumerate(ends) if any(abs(end - t) < DELIVERY * streams for t in answers[0].times)]
    assert found.steps < len(marks) <= len(ends)
    mean = (ends[-1] - ends[0]) / (len(ends) - 1)
    assert found.step_s == pytest.approx(mean, rel=0.5)
    assert found.tokens > 1.2 * streams * found.steps
    assert all(share.tokens == 2 for share in found.shares)


def test_one_stream_has_the_rates_that_are_its_metrics() -> None:
    [only], _ = simulate(random.Random(3), 1, 9, 0.0)
    found = figures.decode_phase((only,))
    assert found
    assert found.tokens_per_s == pytest.approx(only.metrics.tokens_per_s)
    assert figures.prefill_phase((only,)).tokens_per_s == pytest.approx(only.metrics.prefill_tokens_per_s)


@pytest.mark.parametrize("output", [1, 2])
def test_streams_without_two_common_steps_have_no_rate(output: int) -> None:
    answers, _ = simulate(random.Random(0), 4, output, 0.0)
    assert figures.decode_phase(answers) is None


# Lengths are whole tokens; of streams that come behind another in a step, those of one step before count.
@pytest.mark.parametrize(("streams", "apart"), [(1, 0.004), (3, 0.01)])
def test_bytes_of_decoding_are_those_of_its_steps_one_by_one(streams: int, apart: float) -> None:
    answers, _ = simulate(random.Random(1), streams, 24, 0.0)
    found = figures.decode_phase(answers)
    assert found
    # Steps in which all decode; the stream i begins in step i, and has seen 100 tokens and those before it.
    first = 1 if streams == 1 else streams + 1
    steps = [tuple(SequenceStep(1, 100 + step - stream) for stream in range(streams)) for step in range(first, 24)]
    assert len(steps) == found.steps
    counted = sum(bytes_read(CONFIG, WEIGHTS, step, *BF16) for step in steps)
    work = figures.decode_work(found, CONFIG, WEIGHTS, *BF16)
    assert work.bytes * found.steps == pytest.approx(counted, rel=apart)
    assert work.flops * found.steps == pytest.approx(sum(flops(CONFIG, step) for step in steps), rel=apart)
    assert (work.weight_bytes, work.tokens_per_step, work.steps) == (1_300_000, streams, 1)


def test_weights_are_read_again_for_each_chunk_of_a_prompt() -> None:
    one = answer(0.0, [(1.0, True), (2.0, True)], prompt=1200, drafts=0, cached=176)
    found = figures.prefill_phase((one, one))
    work = figures.prefill_work(found, CONFIG, WEIGHTS, *BF16, chunk=512)
    assert (found.tokens, found.seconds, work.steps, work.tokens_per_step) == (2048, 1.0, 4, 512)
    assert work.weight_bytes == 4 * 1_300_000
    once = bytes_read(CONFIG, WEIGHTS, found.shares, *BF16)
    assert work.bytes == once + 3 * 1_300_000
    assert 0 < work.attention_flops < work.flops == flops(CONFIG, found.shares)
