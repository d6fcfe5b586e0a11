"""The queue before the engine: bounded, ordered by priority, with statistics."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.errors import Busy, ContextOverflow, UsageError
from localllm.request import ChatRequest, GenerationEvent
from tests.shared import shared
from tests.work import counted_lines

PROMPT = "Once upon a time"
SHORT = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load(shared("stories260K"), max_queue=3) as loaded:
        yield loaded


HELD_S = 60  # at most


@contextmanager
def held(llm: LLM) -> Iterator[None]:
    """Block the engine's thread."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(HELD_S)

    thread = threading.Thread(target=llm.worker.call, args=(wait,))
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
        thread.join(60)


def test_a_request_beyond_the_queue_limit_is_refused_at_once(llm: LLM) -> None:
    request = llm.prepare(ChatRequest(PROMPT, SHORT))
    with held(llm):
        streams = [llm.submit(request) for _ in range(3)]
        assert llm.stats().waiting == 3
        for _ in range(100):
            with pytest.raises(Busy, match=r"3 requests are waiting.*try again later") as caught:
                llm.submit(request)
            assert caught.value.retry_after > 0
        with pytest.raises(Busy), counted_lines() as count:
            llm.submit(request)
        assert count.lines < 60  # 17 measured, before any other work for the request
    texts = {"".join(event.text for event in stream) for stream in streams}
    assert len(texts) == 1
    assert llm.generate(PROMPT, SHORT).text in texts  # there is room again
    assert llm.stats().waiting == 0


def test_closing_from_another_thread_unblocks_the_reader_while_the_engine_is_busy(llm: LLM) -> None:
    streaming = llm.stream(PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    next(streaming)
    read = dict[str, list[GenerationEvent]]()
    with held(llm):
        streams = {"said something": streaming, "waits": llm.stream(PROMPT, SHORT)}

        def collect(name: str) -> None:
            read[name] = list(streams[name])

        threads = [threading.Thread(target=collect, args=(name,)) for name in streams]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert all(thread.is_alive() for thread in threads)
        start = time.perf_counter()
        for stream in streams.values():
            stream.close()
        for thread in threads:
            thread.join(60)
        assert time.perf_counter() - start < HELD_S / 2
    assert read["waits"] == []
    assert not any(event.finish_reason for event in read["said something"])
    llm.worker.call(lambda: None)
    assert (llm.stats().running, llm.stats().waiting, llm.stats().used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("most", [0, -1, True, "many"])
def test_an_invalid_queue_limit_is_rejected(most: int) -> None:
    with pytest.raises(UsageError, match="max_queue"):
        localllm.load("demo", max_queue=most)


def test_more_priority_is_answered_first(llm: LLM) -> None:
    order: list[int] = []
    llm.worker.engine.scheduler.max_running, before = 1, llm.worker.engine.scheduler.max_running
    with held(llm):
        streams = [
            llm.submit(
                llm.prepare(ChatRequest(PROMPT, SHORT, priority=priority)),
                lambda said, p=priority: order.append(p),
            )
            for priority in (0, 1, 2)
        ]
    while any(stream.output.sequence in llm.worker.outputs for stream in streams) or len(order) < 3:
        time.sleep(0.001)
    llm.worker.engine.scheduler.max_running = before
    assert order == [2] * 8 + [1] * 8 + [0] * 8


def test_a_request_may_have_less_context_than_the_model(llm: LLM) -> None:
    request = llm.prepare(ChatRequest([5] * 20, SamplingParams(ignore_eos=True), context=24))
    *_, last = llm.submit(request)
    assert last.metrics
    assert last.metrics.output_tokens == 4
    with pytest.raises(ContextOverflow, match="20 tokens and the context holds 20"):
        llm.prepare(ChatRequest([5] * 20, context=20))
    with pytest.raises(UsageError, match="context is 0"):
        llm.prepare(ChatRequest([5], context=0))
    with pytest.raises(UsageError, match=r"priority is 1\.5"):
        llm.prepare(ChatRequest([5], priority=1.5))  # pyright: ignore[reportArgumentType]


def test_engine_statistics_are_counted() -> None:
    with localllm.load(shared("stories260K"), draft="off") as llm:
        ids = [7, *range(30, 69)]
        first = llm.generate(ids, SHORT)
        llm.generate(ids, SHORT)
        stream = llm.stream([5] * 20, SamplingParams(ignore_eos=True))
        next(stream)
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
        llm.worker.call(lambda: None)
        stats = llm.stats()
        assert len(first.token_ids) == 8
        assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
        assert (stats.lookups, stats.hits, stats.prompt_tokens, stats.cached_tokens) == (3, 1, 100, 32)
        assert stats.hit_rate == 0.32
        assert stats.output_tokens >= 17
        assert stats.steps >= 17
        assert stats.finished == {"length": 2}
        assert (stats.cancelled, stats.preemptions, stats.draft_tokens, stats.evicted_blocks) == (1, 0, 0, 0)
        assert stats.cached_blocks >= 2
        assert stats.blocks * stats.block_tokens >= stats.context == llm.context


def test_numbers_are_read_while_a_step_runs(llm: LLM) -> None:
    with held(llm):
        start = time.perf_counter()
        for _ in range(100):
            llm.stats()
        assert time.perf_counter() - start < HELD_S / 2


def test_throughput_mode_has_no_queue_limit() -> None:
    with localllm.load(shared("stories260K"), max_queue=1) as llm:
        llm.prefer_throughput()
        request = llm.prepare(ChatRequest(PROMPT, SHORT))
        with held(llm):
            streams = [llm.submit(request) for _ in range(600)]
        assert len({"".join(event.text for event in stream) for stream in streams}) == 1


def test_a_stream_knows_what_is_there_already(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SHORT)
    while llm.worker.call(lambda: llm.worker.engine.has_unfinished_requests):
        time.sleep(0.001)
    more: list[bool] = []
    while True:
        more.append(stream.has_more)
        if next(stream, None) is None:
            break
    assert more == [True] * 8 + [False]


def test_an_idle_engine_delivers_an_error_that_no_step_follows(llm: LLM) -> None:
    """The context was reduced between preparing and submitting."""
    request, context = llm.prepare(ChatRequest([5] * 20, SHORT)), llm.worker.context
    with held(llm):
        stream = llm.submit(request)
        llm.worker.context = 16
    try:
        with pytest.raises(ContextOverflow):
            next(stream)
    finally:
        llm.worker.context = context


def test_64_requests_to_a_small_model_get_their_first_tokens_in_the_same_step() -> None:
    first_tokens = list[int | None]()
    with localllm.load(shared("stories260K")) as llm:

        def step() -> None:
            for event in llm.worker.engine.step():
                first_tokens.append(event.token_id)
                llm.worker.deliver(event)

        with held(llm):
            streams = [llm.stream([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)) for _ in range(64)]
            llm.worker.post(step)
        assert [len([event for event in stream if event.token_ids]) for stream in streams] == [8] * 64
    assert len(first_tokens) == 64
