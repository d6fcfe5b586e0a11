"""Percentiles of recent answers."""

import math

import numpy
import pytest

from localllm.metrics import Metrics
from localllm.server.request_stats import MAX_GAPS, WINDOW_S, RecentLatencies


def measured(ttft, *gaps):
    return Metrics(4, 0, len(gaps) + 1, 0.5, 0.0, 0.1, ttft, gaps, 1.0, 0)


def test_percentiles_are_of_all_answers_in_the_window():
    recent = RecentLatencies()
    for ttft in (0.1, 0.2, 0.3):
        recent.answer_ended("a", measured(ttft, 0.01, 0.02))
    recent.answer_ended("b", measured(9.0))
    found = recent.percentiles("a")
    assert found["answers"] == 3
    for percent in (50, 95, 99):
        assert found["ttft"][f"p{percent}_s"] == pytest.approx(numpy.percentile([0.1, 0.2, 0.3], percent))
        assert found["itl"][f"p{percent}_s"] == pytest.approx(numpy.percentile([0.01, 0.02] * 3, percent))
    assert found["queue"] == {"p50_s": 0.5, "p95_s": 0.5, "p99_s": 0.5}


def test_answers_are_forgotten_in_time():
    now = [0.0]
    recent = RecentLatencies(clock=lambda: now[0])
    recent.answer_ended("a", measured(0.1, 0.01))
    now[0] = WINDOW_S + 1
    recent.answer_ended("a", measured(0.3))
    assert recent.percentiles("a")["answers"] == 1
    assert recent.percentiles("a")["ttft"]["p50_s"] == 0.3
    assert recent.percentiles("a")["itl"]["p50_s"] is None


def test_models_without_requests_have_no_statistics():
    found = RecentLatencies().percentiles("a")
    assert found["answers"] == 0 and found["ttft"] == {"p50_s": None, "p95_s": None, "p99_s": None}


def test_an_answer_without_tokens_is_not_counted():
    recent = RecentLatencies()
    recent.answer_ended("a", measured(math.nan))
    assert recent.percentiles("a")["answers"] == 0


def test_gaps_stay_few_enough_to_sort():
    recent = RecentLatencies()
    recent.answer_ended("a", measured(0.1, *[0.01] * (MAX_GAPS + 5)))
    assert len(recent.models["a"].itl) == MAX_GAPS
