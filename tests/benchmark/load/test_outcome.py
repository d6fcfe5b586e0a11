"""Goodput, rates and notes from synthetic outcomes."""

import math

import pytest

from localllm.benchmark.load.drive import LoadRound
from localllm.benchmark.load.outcome import LatencyObjective, RequestOutcome
from localllm.benchmark.load.run import LoadMeasures, queue_grows
from localllm.errors import UsageError


def answer(arrival: float, *pieces: float, tokens: int | None = None) -> RequestOutcome:
    counted = "usage" if tokens is not None else None
    return RequestOutcome(arrival, arrival, pieces, pieces[-1], 10, tokens, counted)


def test_rates_span_all_rounds_and_goodput_counts_requests_that_met_every_objective():
    fast = answer(0.0, 0.1, 0.2, 0.3, tokens=3)  # TTFT 100 ms, TPOT 100 ms
    late = answer(0.0, 0.5, 0.6, 0.7, tokens=3)  # TTFT 500 ms
    slow = answer(11.0, 11.1, 11.9, tokens=2)  # TPOT 800 ms
    failed = RequestOutcome(11.0, 11.0, error="HTTP 503")
    rounds = [LoadRound(0.0, [fast, late]), LoadRound(10.0, [slow, failed])]
    measured = LoadMeasures(rounds, LatencyObjective.parse("ttft=200ms,tpot=150ms"))
    assert measured.wall_s == pytest.approx(0.7 + 1.9)
    assert measured.requests_per_s == pytest.approx(3 / 2.6)
    assert measured.output_tokens_per_s == pytest.approx(8 / 2.6)
    assert measured.met_objectives == 1 and measured.goodput == pytest.approx(1 / 2.6)
    assert measured.errors == {"HTTP 503": 1}
    assert measured.latency("ttft_s").p50 == pytest.approx(0.1)
    assert measured.latency("itl_s").count == 5


def test_unknown_token_counts_give_no_rate():
    measured = LoadMeasures([LoadRound(0.0, [answer(0, 1, 2, tokens=2), answer(0, 1, 2)])])
    assert measured.output_tokens is None and math.isnan(measured.output_tokens_per_s)
    assert (measured.uncounted_answers, measured.met_objectives) == (1, None)
    assert measured.requests_per_s == 1


@pytest.mark.parametrize(
    ("objective", "outcome", "met"),
    [
        ("e2e=1s", answer(0, 0.5, 1.0, tokens=2), True),
        ("e2e=999ms", answer(0, 0.5, 1.0, tokens=2), False),
        ("itl=400ms", answer(0, 0.1, 0.4, 0.9, tokens=3), False),  # p99 of 300 and 500 ms
        ("itl=500ms", answer(0, 0.1, 0.4, 0.9, tokens=3), True),
        ("itl=1us,tpot=1us", answer(0, 0.1, tokens=1), True),  # a single token has neither
        ("tpot=1s", answer(0, 0.1, 0.2), False),  # nobody counted
        ("ttft=1s", RequestOutcome(0, 0, (), 0.5, 1, 0, "usage"), False),  # nothing was said
        ("ttft=1s", RequestOutcome(0, 0, (0.1,), error="time-out"), False),
    ],
)
def test_objectives_hold_or_do_not(objective, outcome, met):
    assert LatencyObjective.parse(objective).is_met(outcome) is met


def test_objectives_are_read_with_their_units():
    assert LatencyObjective.parse("ttft=500ms, tpot=50ms,e2e=1.5s,itl=800us").limits == {
        "ttft": 0.5,
        "tpot": pytest.approx(0.05),
        "e2e": 1.5,
        "itl": pytest.approx(800e-6),
    }


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=5", "ttft=0ms", "ttft=-1s", "ttft=nanms", "speed=1s", "ttft=1s,ttft=2s", "e2e=1h"],
)
def test_invalid_objectives_are_refused(text):
    with pytest.raises(UsageError, match="--slo"):
        LatencyObjective.parse(text)


def test_a_growing_queue_is_distinguished_from_a_varying_one():
    assert queue_grows([place // 2 for place in range(80)])
    assert not queue_grows([3, 5, 4, 2, 6, 4, 3, 5] * 10)
    assert not queue_grows([0] * 40)
    assert not queue_grows([])
