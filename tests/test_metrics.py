import math

import numpy
import pytest

from localllm.metrics import PhaseTimer, Stopwatch, percentile


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_definition_on_a_known_course() -> None:
    clock = Clock()
    watch = Stopwatch(arrival=10.0, load_s=3.0, clock=clock)
    clock.now = 11.0
    watch.mark_scheduled()
    clock.now = 12.0
    watch.mark_scheduled()  # preempted and taken up again: not new
    for now in (13.0, 13.5, 14.5, 15.0):
        clock.now = now
        watch.record_token()
    m = watch.finish(prompt_tokens=20, cached_tokens=16, peak_bytes=5)
    assert (m.queue_s, m.load_s, m.prefill_s, m.ttft_s, m.e2e_s) == (1.0, 3.0, 2.0, 3.0, 5.0)
    assert m.itl_s == (0.5, 1.0, 0.5)
    assert m.tpot_s == pytest.approx(2.0 / 3)
    assert m.tokens_per_s == pytest.approx(1.5)
    assert m.prefill_tokens_per_s == 2.0
    assert m.itl_percentile(50) == 0.5
    assert m.as_dict()["itl_p99_s"] == pytest.approx(0.99)


def test_no_measurement_is_reported_as_none() -> None:
    m = Stopwatch(arrival=0.0, clock=Clock()).finish(3, 0, 5)
    assert math.isnan(m.ttft_s) and math.isnan(m.tokens_per_s) and math.isnan(m.itl_percentile(50))
    assert m.as_dict()["ttft_s"] is None
    assert m.as_dict()["output_tokens"] == 0


@pytest.mark.parametrize("percent", [0, 1, 50, 95, 99, 100])
def test_percentiles_are_those_of_numpy(percent: float) -> None:
    values = [3.0, 1.0, 2.0, 10.0, 7.5]
    assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_a_phase_inside_another_counts_for_itself_alone() -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.5, 5.0, 9.0, 10.0])
    phases = PhaseTimer(lambda: next(clock))
    with phases("weights"):
        for _ in range(2):
            with phases("repack"):
                pass
    with phases("cache"):
        pass
    assert phases.seconds == {"weights": 1.0 + 0.5 + 0.5, "repack": 2.0 + 1.0, "cache": 1.0}
    assert list(phases.seconds) == ["weights", "repack", "cache"]
