"""`Retry-After` of a full queue: from the simulated queue, against a real server under overload."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import localllm
from localllm.errors import QueueFull
from localllm.llm import queue_forecast
from localllm.llm.llm import LLM
from localllm.llm.queue_forecast import FALLBACK_S, Forecast, QueueForecast
from localllm.request import ChatRequest, SamplingParams
from localllm.runtime.engine import TokenEvent
from localllm.runtime.step import StepShape
from tests.server.conftest import serving

QUEUE, TOKENS, REFUSED = 4, 40, 3
STEP_S = 0.1  # of a step, on the clock of the test
REAL_STEP_S = 0.01  # at least: requests of the test take less than several steps
FACTOR = 2.0  # that the wait may be off, besides the rounding to a second


@pytest.fixture
def llm() -> Iterator[LLM]:
    with localllm.load("demo", context=1024, max_queue=QUEUE, draft="off") as loaded:

        def one_at_a_time() -> None:
            loaded.worker.engine.scheduler.max_running = 1

        loaded.worker.call(one_at_a_time)
        yield loaded


class EvenSteps:
    """Recorded steps, as if each had taken STEP_S."""

    def __init__(self, steps: Iterable[tuple[StepShape, float]]):
        self.steps = steps

    def __iter__(self) -> Iterator[tuple[StepShape, float]]:
        return iter([(shape, STEP_S) for shape, _ in self.steps])


def count_time_in_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, hurry: threading.Event) -> Callable[[], float]:
    """Return a clock on which each step takes STEP_S, however busy the machine is, and let forecasts use it. Steps
    are slow until `hurry` is set."""
    engine, forecast = llm.worker.engine, llm.worker.queue_forecast
    step = engine.step

    def clock() -> float:
        return engine.steps * STEP_S

    def slow_step() -> list[TokenEvent]:
        hurry.wait(REAL_STEP_S)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    monkeypatch.setattr(forecast, "steps", EvenSteps(forecast.steps))
    monkeypatch.setattr(forecast, "clock", clock)
    return clock


def post(url: str, prompt: str, tokens: int = TOKENS) -> httpx2.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=120)


def admission_times(llm: LLM, clock: Callable[[], float], until: threading.Event) -> list[float]:
    """Return when each request was admitted."""
    times: list[float] = []
    seen = llm.worker.engine.scheduler.prefix_lookups
    while not until.wait(0.005):
        if (now := llm.worker.engine.scheduler.prefix_lookups) > seen:
            times += [clock()] * (now - seen)
            seen = now
    return times


def test_a_refused_request_is_accepted_after_the_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th refused request is told when the k-th place becomes free, and is accepted then."""
    hurry, done = threading.Event(), threading.Event()
    clock = count_time_in_steps(llm, monkeypatch, hurry)
    with serving(llm) as url, ThreadPoolExecutor(QUEUE + 3) as clients:
        for number in range(2):
            assert post(url, f"Warming up {number}").status_code == 200
        answers = [clients.submit(post, url, "0 people")]
        while not llm.worker.engine.scheduler.running:
            time.sleep(0.005)
        answers += [clients.submit(post, url, f"{number} people") for number in range(1, QUEUE + 1)]
        while llm.worker.waiting < QUEUE:
            time.sleep(0.005)
        watch = clients.submit(admission_times, llm, clock, done)
        try:
            refused = [(post(url, "One more"), clock()) for _ in range(REFUSED)]
            assert [answer.status_code for answer, _ in refused] == [503] * REFUSED
            waits = [int(answer.headers["retry-after"]) for answer, _ in refused]
            while clock() < refused[-1][1] + waits[-1]:
                time.sleep(0.005)
            last = clients.submit(post, url, "One more", tokens=2)
            time.sleep(0.3)  # for it to be refused or accepted
            hurry.set()
            assert last.result().status_code == 200
            assert all(answer.result().status_code == 200 for answer in answers)
        finally:
            hurry.set()
            done.set()  # or the thread that watches would be waited for
        admitted = watch.result()
    assert waits == sorted(waits)
    for wait, (_, at), free_at in zip(waits, refused, admitted, strict=False):
        actual = free_at - at
        assert actual / FACTOR <= wait <= actual * FACTOR + 1, (waits, actual)


def test_requests_that_the_engine_has_not_taken_are_counted(llm: LLM) -> None:
    llm.generate("Once", SamplingParams(max_tokens=100, ignore_eos=True))
    step_ends = threading.Event()
    llm.worker.post(step_ends.wait)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    streams = [llm.submit(llm.prepare(ChatRequest(f"{i}", params))) for i in range(QUEUE)]
    forecast = llm.worker.queue_forecast
    forecast.refresh()
    step_ends.set()
    assert forecast.forecast and len(forecast.forecast.starts) == QUEUE
    for stream in streams:
        stream.close()


def test_without_recorded_steps(llm: LLM) -> None:
    forecast = llm.worker.queue_forecast
    forecast.refresh()
    assert forecast.retry_after() == FALLBACK_S == 5


def test_places_are_promised_once() -> None:
    now = 100.0
    forecast = QueueForecast.__new__(QueueForecast)
    forecast.clock, forecast.promised = (lambda: now), []
    forecast.forecast = Forecast(90.0, (4.0, 12.5, 20.0, 33.0), 40.0)
    assert [forecast.retry_after() for _ in range(3)] == [3, 10, 23]  # one has started since
    assert forecast.retry_after() == math.ceil(40 + 10 - 10)  # beyond the forecast: at its mean rate
    now = 111.0  # two promises have passed, and with them two more starts
    assert forecast.retry_after() == math.ceil(40 + 10 + 10 - 21)


def test_effort_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast ends after its time, and is used for as long as it stays cheap."""
    llm.generate("Once", SamplingParams(max_tokens=100, ignore_eos=True))
    llm.worker.call(lambda: None)
    monkeypatch.setattr(queue_forecast, "MAX_EFFORT_S", 0.0)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    streams = [llm.submit(llm.prepare(ChatRequest(f"{i}", params))) for i in range(4)]
    forecast = llm.worker.queue_forecast
    monkeypatch.setattr(forecast, "clock", lambda: 100.0)
    forecast.refresh()
    assert forecast.forecast == Forecast(100.0, (), 0.0) and forecast.is_fresh
    assert 1 <= forecast.retry_after() <= queue_forecast.LONGEST_S
    for stream in streams:
        stream.close()


def test_the_error_of_a_full_queue(llm: LLM) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    streams = []
    with pytest.raises(QueueFull, match="the queue is full") as caught:
        for number in range(QUEUE + 20):
            streams.append(llm.submit(llm.prepare(ChatRequest(f"{number}", params))))
    assert caught.value.retry_after > 0
    for stream in streams:
        stream.close()
