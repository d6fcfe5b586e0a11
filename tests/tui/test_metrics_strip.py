import math
from dataclasses import replace

import pytest
from textual.app import App

from localllm.tui.answer_thread import AnswerEnd
from localllm.tui.metrics_strip import (
    IDLE_NUMBERS,
    NO_METRICS,
    AnswerPhase,
    LiveMetrics,
    LiveNumbers,
    MetricsStrip,
    render_metrics,
)
from tests.tui.scripted_events import FakeModel, story


def numbers_of(steps: int, upto: int | None = None, **options) -> LiveNumbers:
    events = list(story(steps, **options))[:upto]
    live = LiveMetrics(100.0, FakeModel.reads)
    live.follow(events)
    return live.numbers(events[-1][0])


def texts(numbers: LiveNumbers, width: int) -> list[str]:
    return render_metrics(numbers, FakeModel.context, width).plain.split("\n")


def columns(line: str) -> list[int]:
    """Column of each name."""
    return [
        line.index(name)
        for name in ("TTFT", "ITL", "p95", "KV", "roofline", "drafts", " of 4,096")
        if name in line
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_nothing_moves_while_numbers_change(width: int) -> None:
    shown = [texts(numbers_of(200, upto), width) for upto in (2, 3, 30, 100, None)] + [texts(IDLE_NUMBERS, width)]
    assert all(len(both) == 2 and len(both[0]) == width and len(both[1]) <= width for both in shown)
    for line in (0, 1):
        assert len({tuple(columns(both[line])) for both in shown}) == 1


def test_all_metrics_are_shown_on_wide_screens() -> None:
    first, second = texts(numbers_of(200), 150)
    for said in ("TTFT", "151 ms", "now", "146 tokens/s", "average", "ITL p50 8.34 ms", "p95 10.9 ms", "▄▄▃▃█"):
        assert said in first
    for said in ("892 of 4,096", "KV 58.4 MB", "roofline   63%", "cached    96", "drafts 91 of 160", "1 running"):
        assert said in second


def test_the_least_important_metrics_are_dropped_first() -> None:
    first, second = texts(numbers_of(200), 40)
    assert "146 tokens/s" in first and "ITL" not in first
    assert "892 of 4,096" in second and "drafts" not in second


def test_a_prompt_being_read_shows_its_speed() -> None:
    first, _ = texts(numbers_of(40, 1), 80)
    assert first.startswith("prefill 352 of 600 tokens   5000 tokens/s  ███")
    assert first.endswith("░") and len(first) == 80


def test_waiting_shows_time_and_queue_position() -> None:
    waiting = LiveNumbers(AnswerPhase.WAITING, NO_METRICS, 1.25, queue_position=3, running=4)
    assert texts(waiting, 80)[0] == "waiting 1.25 s  position 3 in the queue, 4 running"


def test_a_gap_above_the_scale_has_another_colour() -> None:
    numbers = replace(numbers_of(20, drafts=False), gaps=(0.008, 0.009, 0.5))
    styles = {str(span.style) for span in render_metrics(numbers, 4096, 80).spans}
    assert "$error" in styles


def test_a_full_context_and_huge_numbers_keep_within_the_line() -> None:
    metrics = replace(
        NO_METRICS, prompt_tokens=131072, cached_tokens=131072, ttft_s=35999, e2e_s=1e6, output_tokens=9
    )
    huge = LiveNumbers(
        AnswerPhase.ENDED, metrics, 1.0, 123456.0, 1e4, 1e4, (1.0,) * 9, 131072, 131072, 9.99e12, 12.5, 99, 512
    )
    for width in (80, 160):
        assert all(len(line) <= width for line in render_metrics(huge, 131072, width).plain.split("\n"))


class Strip(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def compose(self):
        yield MetricsStrip(FakeModel(), clock=lambda: self.now)


async def test_the_strip_follows_an_answer_and_dims_when_it_has_ended(until) -> None:
    app = Strip()
    async with app.run_test(size=(80, 4)) as pilot:
        strip = app.query_one(MetricsStrip)
        assert strip.has_class("-idle") and strip.size.height == 2
        strip.begin(100.0)
        app.now = 100.02
        await until(pilot, lambda: "20.0 ms" in strip.render().plain)
        assert not strip.has_class("-idle")
        events = list(story(60))
        strip.follow(events[:-1])
        app.now = events[-2][0]
        await until(pilot, lambda: "TTFT  151 ms" in strip.render().plain)
        strip.follow(events[-1:])
        strip.end(AnswerEnd(False))
        await until(pilot, lambda: strip.has_class("-idle"))
        assert strip.numbers.metrics is events[-1][1].metrics
        app.now = 200.0
        before = strip.numbers
        await pilot.pause(0.1)
        assert strip.numbers is before  # nothing is drawn any more


async def test_the_next_answer_begins_again(until) -> None:
    app = Strip()
    async with app.run_test(size=(80, 4)) as pilot:
        strip = app.query_one(MetricsStrip)
        for _ in range(2):
            strip.begin(100.0)
            assert strip.numbers.phase is AnswerPhase.WAITING and math.isnan(strip.numbers.metrics.ttft_s)
            strip.follow(list(story(5)))
            strip.end(AnswerEnd(True))
            await until(pilot, lambda: strip.numbers.phase is AnswerPhase.ENDED)
