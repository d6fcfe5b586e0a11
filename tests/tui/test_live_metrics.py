import math
import time
from itertools import pairwise

import pytest

from localllm.conversation.chat import Chat
from localllm.metrics import StepReads, StepReport
from localllm.request import GenerationEvent, SamplingParams
from localllm.tui.answer_thread import AnswerThread
from localllm.tui.metrics_strip import MAX_GAPS, AnswerPhase, LiveMetrics
from tests.tui.scripted_events import FakeModel, story

NAMES = ("prompt_tokens", "cached_tokens", "output_tokens", "draft_tokens", "accepted_tokens")
TIMES = ("queue_s", "prefill_s", "ttft_s", "tpot_s", "tokens_per_s", "e2e_s")


def at_tokens(*times: float) -> LiveMetrics:
    live = LiveMetrics(100.0)
    live.follow([(100 + at, GenerationEvent(1, "a", (1,))) for at in times])
    return live


def test_before_anything_is_reported_the_answer_waits() -> None:
    numbers = LiveMetrics(100.0).numbers(100.5)
    assert (numbers.phase, numbers.elapsed_s, numbers.context_tokens) == (AnswerPhase.WAITING, 0.5, None)
    assert math.isnan(numbers.metrics.ttft_s) and math.isnan(numbers.current_tokens_per_s)


def test_the_queue_position_is_shown_until_the_first_step() -> None:
    live = LiveMetrics(100.0)
    live.follow([(100.1, GenerationEvent(1, step=StepReport(0.1, 0.1, 0, 0, 0, 0, 4, 2, place=3, prompt=50)))])
    numbers = live.numbers(100.2)
    assert (numbers.phase, numbers.queue_position, numbers.running, numbers.waiting) == (
        AnswerPhase.WAITING,
        3,
        4,
        2,
    )
    live.follow([(100.3, GenerationEvent(1, step=StepReport(0.2, 0.3, 30, 30, 2, 0, 4, 2, prompt=50)))])
    numbers = live.numbers(100.3)
    assert (numbers.phase, numbers.queue_position, numbers.prefilled_tokens) == (AnswerPhase.PREFILL, 0, 30)
    assert numbers.metrics.queue_s == pytest.approx(0.2)


def test_a_prompt_is_followed_while_it_is_read() -> None:
    events = list(story(prompt=600, found=96))
    live = LiveMetrics(100.0, FakeModel.reads)
    live.follow(events[:1])
    numbers = live.numbers(events[0][0])
    assert numbers.phase is AnswerPhase.PREFILL
    assert (numbers.prefilled_tokens, numbers.metrics.prompt_tokens, numbers.metrics.cached_tokens) == (
        352,
        600,
        96,
    )
    assert numbers.kv_bytes == 352 * 65536 and numbers.context_tokens == 352
    assert numbers.roofline_fraction is None


@pytest.mark.parametrize("drafts", [False, True])
def test_live_numbers_agree_with_the_engine(drafts: bool) -> None:
    events = list(story(drafts=drafts))
    measured = events[-1][1].metrics
    live = LiveMetrics(100.0, FakeModel.reads)
    for came in events[:-1]:
        live.follow([came])
    when, last = events[-1]
    live.follow([(when, GenerationEvent(1, "", last.token_ids, step=last.step))])
    before = live.numbers(when)
    assert before.phase is AnswerPhase.DECODE
    for name in (*NAMES, *TIMES):
        assert getattr(before.metrics, name) == pytest.approx(getattr(measured, name)), name
    assert before.itl_p50_s == pytest.approx(measured.itl_percentile(50))
    assert before.itl_p95_s == pytest.approx(measured.itl_percentile(95))
    live.follow(events[-1:])
    after = live.numbers(when + 60)
    assert after.phase is AnswerPhase.ENDED and after.metrics is measured
    assert after.context_tokens == measured.prompt_tokens + measured.output_tokens == before.context_tokens
    assert after.kv_bytes == before.kv_bytes == 65536 * (after.context_tokens - 1)


def test_the_rate_of_now_is_that_of_the_last_second() -> None:
    slow = [0.5 * n for n in range(1, 5)]
    fast = [2 + 0.1 * n for n in range(1, 21)]
    live = at_tokens(*slow, *fast)
    assert live.numbers(104.0).current_tokens_per_s == pytest.approx(10)
    assert live.numbers(104.0).metrics.tokens_per_s == pytest.approx(23 / 3.5)


def test_the_rate_of_now_falls_while_the_next_token_is_overdue_and_only_then() -> None:
    live = at_tokens(*(0.1 * n for n in range(1, 31)))
    rates = [live.numbers(103 + late).current_tokens_per_s for late in (0.0, 0.05, 0.1, 1.0, 10.0)]
    assert rates[:3] == pytest.approx([10, 10, 10])
    assert rates[3] == pytest.approx(11 / 2.0) and rates[4] == pytest.approx(11 / 11.0)


def test_a_token_every_two_seconds_is_half_a_token_a_second() -> None:
    live = at_tokens(2, 4, 6)
    assert (
        live.numbers(106.0).current_tokens_per_s == live.numbers(107.9).current_tokens_per_s == pytest.approx(0.5)
    )


def test_tokens_of_one_step_alone_have_no_rate() -> None:
    assert math.isnan(at_tokens(1.0).numbers(101).current_tokens_per_s)
    assert math.isnan(at_tokens(1.0, 1.0).numbers(101).current_tokens_per_s)


def test_the_roofline_counts_steps_and_not_tokens() -> None:
    reads = StepReads(weights=1e9, per_token=0, kept_per_token=1, bandwidth=100e9)
    live = LiveMetrics(100.0, reads)
    for n in range(1, 12):  # ten steps a second, each with a draft that is right
        step = StepReport(n / 10 - 0.1, n / 10, 2, 10 + 2 * n, 2, 0, 1, 0, (7,), 1, prompt=10)
        live.follow([(100 + n / 10, GenerationEvent(1, "a", (6,), drafted=1, step=step))])
        live.follow([(100 + n / 10, GenerationEvent(1, "b", (7,), accepted=True))])
    numbers = live.numbers(101.1)
    assert numbers.current_tokens_per_s == pytest.approx(20, rel=0.06)
    assert numbers.roofline_fraction == pytest.approx(0.1, rel=0.06)
    assert numbers.metrics.acceptance_rate == 1


def test_an_answer_that_was_stopped_keeps_its_numbers() -> None:
    live = at_tokens(*(0.1 * n for n in range(1, 31)))
    live.end()
    early, late = live.numbers(103), live.numbers(200)
    assert early.phase is late.phase is AnswerPhase.ENDED and early.elapsed_s == late.elapsed_s == pytest.approx(3)
    assert early.metrics.output_tokens == 30
    assert late.current_tokens_per_s == late.metrics.tokens_per_s == pytest.approx(10)


def test_gaps_for_drawing_are_bounded() -> None:
    live = at_tokens(*(0.01 * n for n in range(5000)))
    assert len(live.numbers(150).gaps) == MAX_GAPS
    assert live.numbers(150).metrics.output_tokens == 5000


def test_the_numbers_of_the_bundled_model_agree_with_its_own(demo) -> None:
    """Before the engine reports its metrics, the computed ones differ from them by less than the delay between
    threads.
    """
    chat = Chat(demo, SamplingParams(temperature=0, max_tokens=60))
    assert list(chat.ask("hello"))  # else the time to make the template's process ready is a part of it
    chat.inspect = 0
    answering = AnswerThread(lambda: chat.ask("Tell me a story about a dragon"), chat.stop)
    live, blind, seen = LiveMetrics(answering.began, demo.reads), LiveMetrics(answering.began, demo.reads), []
    ended, looks = None, [time.perf_counter()]
    while not ended:
        came, ended = answering.drain()
        seen += came
        looks.append(time.perf_counter())
        time.sleep(0.001)
    assert ended.error is None
    measured = seen[-1][1].metrics
    live.follow([(when, GenerationEvent(1, token_ids=e.token_ids, step=e.step)) for when, e in seen])
    blind.follow([(when, GenerationEvent(1, token_ids=e.token_ids)) for when, e in seen])
    late = max(b - a for a, b in pairwise(looks))  # on a busy machine
    for one, jitter in ((live, 0.05 + late), (blind, 0.25 + late)):
        numbers = one.numbers(seen[-1][0])
        assert numbers.metrics.output_tokens == measured.output_tokens
        assert numbers.metrics.ttft_s == pytest.approx(measured.ttft_s, abs=jitter)
        assert numbers.metrics.e2e_s == pytest.approx(measured.e2e_s, abs=jitter)
    numbers = live.numbers(seen[-1][0])
    assert numbers.metrics.prompt_tokens == measured.prompt_tokens
    assert numbers.metrics.cached_tokens == measured.cached_tokens
    assert numbers.context_tokens == measured.prompt_tokens + measured.output_tokens
    times = [when for when, event in seen if event.token_ids]
    assert all(a <= b for a, b in pairwise(times))
