"""Changing the context of a loaded model: running answers are unchanged, and a context that does not fit changes
nothing."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

import localllm
from localllm import LLM, SamplingParams
from localllm.errors import ContextOverflow, DoesNotFit, UsageError
from localllm.modelfile.edition import Edition
from localllm.request import ChatRequest
from tests.llm.test_worker import held
from tests.models.families import FAMILIES
from tests.shared import shared
from tests.tiny import make_checkpoint

PROMPT = "Once upon a time"


def test_a_running_answer_is_unchanged_by_a_resize() -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    with localllm.load(shared("stories260K"), context=256, deterministic=True) as llm:
        expected = llm.generate(PROMPT, params).text
        for context in (512, 128):
            stream = llm.stream(PROMPT, params)
            text = "".join(next(stream).text for _ in range(20))
            llm.resize(context)
            assert text + "".join(event.text for event in stream) == expected
            assert llm.context == llm.stats().context == llm.memory.context == context
            assert llm.generate(PROMPT, params).text == expected
            llm.worker.call(llm.worker.engine.pool.check_all_free)


def test_the_new_context_limits_prompts() -> None:
    with localllm.load(shared("stories260K"), context=64) as llm:
        with pytest.raises(ContextOverflow):
            llm.prepare(ChatRequest([5] * 100))
        llm.resize(256)
        done = llm.generate([5] * 100, SamplingParams(ignore_eos=True))
        assert len(done.token_ids) == 156
        llm.resize(None)
        assert llm.context == 512


def test_an_answer_beyond_the_new_context_ends_with_both_numbers() -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    with localllm.load(shared("stories260K")) as llm:
        long, short = llm.stream([5] * 100, params), llm.stream([5] * 10, params)
        next(long)
        next(short)
        unsubmitted = llm.prepare(ChatRequest([5] * 100, params))
        llm.resize(64)
        with pytest.raises(ContextOverflow, match="the context holds 64"):
            list(long)
        assert list(short)[-1].metrics.output_tokens == 54  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(ContextOverflow, match="100 tokens and the context holds 64"):
            llm.submit(unsubmitted)
        assert llm.stats().finished == {"error": 1, "length": 1}


def test_a_queued_request_obeys_the_new_context() -> None:
    with localllm.load(shared("stories260K")) as llm:
        with held(llm):
            stream = llm.submit(llm.prepare(ChatRequest([5] * 100, SamplingParams(ignore_eos=True))))
            llm.worker.context = 64
        with pytest.raises(ContextOverflow, match="the context holds 64"):
            list(stream)


def test_a_context_that_does_not_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    with localllm.load(shared("stories260K"), context=256) as llm:
        expected = llm.generate(PROMPT, params).text
        stream = llm.stream(PROMPT, params)
        next(stream)
        with pytest.raises(UsageError, match="a context of 513 tokens"):
            llm.resize(513)
        with monkeypatch.context() as little:
            little.setattr("localllm.llm.cache_allocation.free_bytes", lambda device: 0)
            with pytest.raises(DoesNotFit):
                llm.resize(512)
        assert llm.context == 256
        list(stream)
        again = llm.generate(PROMPT, params)
        assert again.text == expected
        assert llm.stats().preemptions == 0


def test_a_failed_allocation_keeps_the_old_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    with localllm.load(shared("stories260K"), context=256) as llm:
        expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60)).text
        room = type(llm.parts.caches.target)
        caches = room.allocate

        def fail(self: object, decoder: object, memory: object) -> object:
            made.append(1)
            if len(made) == 1:
                raise MemoryError
            return caches(self, decoder, memory)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(room, "allocate", fail)
        with pytest.raises(DoesNotFit, match="is out of memory"):
            llm.resize(512)
        assert llm.context == 256
        assert llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60)).text == expected


def test_a_draft_model_follows() -> None:
    folder = shared("stories260K")
    params = SamplingParams(temperature=0, max_tokens=60)
    with localllm.load(folder, context=128, draft_model=folder) as llm:
        expected = llm.generate(PROMPT, params).text
        llm.resize(512)
        before = llm.stats()
        assert llm.generate(PROMPT, params).text == expected
        assert llm.stats().accepted_tokens > before.accepted_tokens
        assert llm.parts.caches.draft_model
        assert llm.parts.caches.draft_model.max_len == 512


@pytest.mark.parametrize("family", ["Qwen3.5", "Phi-4-mini", "LFM2"])
def test_logits_are_those_of_a_model_loaded_with_that_context(family: str, tmp_path: Path) -> None:
    """Covers a model whose rotary embedding changes beyond its original context, and two with recurrent layers."""
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    vocabulary = {f"t{i}": i for i in range(320)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "t0")).save(str(tmp_path / "tokenizer.json"))
    ids = list(range(5, 40))
    with localllm.load(tmp_path, context=100) as small, localllm.load(tmp_path, context=200) as large:
        of_small, of_large = small.logits(ids), large.logits(ids)
        assert of_small.equal(of_large) == (family != "Phi-4-mini")
        small.resize(200)
        large.resize(100)
        assert small.logits(ids).equal(of_large)
        assert large.logits(ids).equal(of_small)


def test_a_resize_applies_to_all_editions() -> None:
    with localllm.load(shared("stories260K"), context=128) as llm:
        edited = llm.with_edition(Edition("stories260K", system="Be brief."))
        again = edited.with_edition(Edition("stories260K"))
        again.resize(256)
        assert {each.context for each in (llm, edited, again)} == {256}
        assert llm.memory == edited.memory == again.memory


def test_running_embeddings_restart_after_a_resize() -> None:
    with localllm.load(shared("stories260K"), context=256, deterministic=True) as llm:
        llm.worker.engine.scheduler.token_budget = 48
        text = [5 + place % 200 for place in range(200)]
        expected = llm.embed(text).vectors
        assert (llm.embed(text, gone=resizing(llm, 512)).vectors == expected).all()
        with pytest.raises(ContextOverflow, match="the context holds 100"):
            llm.embed(text, gone=resizing(llm, 100))
        llm.worker.call(llm.worker.engine.pool.check_all_free)


def resizing(llm: LLM, context: int) -> Callable[[], bool]:
    """Return a callback that changes the context at its third call, between two batches of embeddings."""
    asked = iter(range(3))

    def change() -> bool:
        if next(asked, 0) == 2:
            llm.resize(context)
        return False

    return change


def test_fewer_sequences_run_after_a_resize_than_before() -> None:
    params, running = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), list[int]()
    with localllm.load(shared("stories260K"), deterministic=True) as llm:
        worker = llm.worker
        prompts = [[5 + index] * 4 for index in range(40)]
        expected = [llm.generate(prompt, params).text for prompt in prompts]

        def step() -> None:
            for event in worker.engine.step():
                worker.deliver(event)
            running.append(llm.stats().running)

        with held(llm):
            streams = [llm.stream(prompt, params) for prompt in prompts]
            worker.post(step)
            resizing = threading.Thread(target=llm.resize, args=(64,))
            resizing.start()
        texts = ["".join(event.text for event in stream) for stream in streams]
        resizing.join(60)
        assert (running, texts) == ([40], expected)
        assert llm.memory.max_running == worker.engine.scheduler.max_running == 32
        assert sorted(worker.engine.free_token_slots) == list(range(32))
