"""Prompts computed in another process: the answers of one, and none is lost when that process ends."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator

import pytest

import localllm
from localllm.disaggregation.prefill_tier import PrefillProcess, PrefillTier
from localllm.errors import LocalLLMError, UsageError
from localllm.llm.llm import LLM
from localllm.llm.worker import Stream
from localllm.request import ChatRequest, Completion, Grammar, GrammarKind, SamplingParams, ToolUse
from tests.parallel.test_processes import is_alive

TEXT = "Once upon a time there was a little fox who lived in the wood with his mother. " * 14
SETUP = {"dtype": "float32", "context": 1024, "device": "cpu", "deterministic": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with contextlib.closing(localllm.load("demo", **SETUP)) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(scope="module")
def apart() -> Iterator[LLM]:
    with contextlib.closing(localllm.load("demo", prefill=1, **SETUP)) as llm:  # type: ignore[arg-type]
        yield llm


def tier_of(llm: LLM) -> PrefillTier:
    tier = llm.parts.caches.prefill_tier
    assert tier
    return tier


def handed_over(llm: LLM) -> int:
    return llm.stats().moves["prefill_to_decode"].bytes


def complete(llm: LLM, name: str) -> Completion:
    """Answer a prompt whose beginning no other has."""
    message = [{"role": "user", "content": f"{name}. {TEXT}"}]
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    if name == "greedy":
        return llm.generate(f"{name}. {TEXT}", greedy)
    if name == "seeded":
        return llm.generate(f"{name}. {TEXT}", SamplingParams(seed=4, max_tokens=24, top_p=0.9, logprobs=1))
    if name == "stop":
        return llm.generate(f"{name}. {TEXT}", SamplingParams(temperature=0, max_tokens=40, stop=("e", "a")))
    if name == "grammar":
        grammar = Grammar(GrammarKind.CHOICE, json.dumps(["red and green", "yellow"]))
        return llm.chat(message, SamplingParams(seed=1, max_tokens=24, grammar=grammar))
    if name == "tools":
        return llm.chat(message, SamplingParams(seed=2, max_tokens=64), [TOOL], tool_use=ToolUse(required=True))
    assert name == "prompt logprobs"  # for which every position is computed here
    return llm.generate(f"{name}. {TEXT}", SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "seeded", "stop", "grammar", "tools", "prompt logprobs"])
def test_answers_are_those_of_one_process(one: LLM, apart: LLM, name: str) -> None:
    before = handed_over(apart)
    expected, answer = complete(one, name), complete(apart, name)
    for field in dataclasses.fields(answer):
        if field.name not in ("metrics", "seed"):
            assert getattr(answer, field.name) == getattr(expected, field.name)
    assert answer.metrics.cached_tokens == expected.metrics.cached_tokens
    assert (handed_over(apart) > before) == (name != "prompt logprobs")


@pytest.mark.slow
def test_answers_do_not_depend_on_a_change_of_the_context(one: LLM, apart: LLM) -> None:
    apart.resize(512)
    assert complete(apart, "greedy").text == complete(one, "greedy").text
    apart.resize(1024)
    before = handed_over(apart)
    assert complete(apart, "greedy").text == complete(one, "greedy").text
    assert handed_over(apart) > before


@pytest.mark.slow
def test_a_closed_stream_cancels_its_prompt(apart: LLM) -> None:
    streams = [submit(apart, f"cancelled {i}. {TEXT}") for i in range(4)]
    for stream in streams:
        stream.close()
    assert complete(apart, "greedy").token_ids
    assert not tier_of(apart).loads
    assert apart.stats().cancelled >= 4
    assert apart.stats().used_blocks == 0


def submit(llm: LLM, prompt: str) -> Stream:
    return llm.answer(ChatRequest(prompt, SamplingParams(temperature=0, max_tokens=8)))


@pytest.mark.slow
def test_a_killed_process_loses_no_request() -> None:
    with contextlib.closing(localllm.load("demo", prefill=2, **SETUP)) as llm:  # type: ignore[arg-type]
        processes = [each.process for each in tier_of(llm).processes]
        streams = [submit(llm, f"{i} {TEXT}") for i in range(6)]
        for process in processes:
            assert process
            process.kill()
            assert list(streams.pop(0))[-1].finish_reason
        assert all(list(stream)[-1].finish_reason for stream in streams)
    deadline = time.monotonic() + 10
    assert not any(process and is_alive(process.pid) and time.monotonic() < deadline for process in processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "does not hand over prompts"),
        ({"cache_dir": "cache"}, "not stored on the disk"),
        ({"prefill": 17}, "at most 16"),
        ({"prefill": -1}, "prefill is -1"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        localllm.load("demo", device="cpu", **{"prefill": 1} | options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_process_that_cannot_load_the_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    send = PrefillProcess.send_setup
    monkeypatch.setattr(PrefillProcess, "send_setup", lambda self, fields: send(self, fields | {"path": "/none"}))
    with pytest.raises(LocalLLMError, match="prefill process 1: "):
        localllm.load("demo", prefill=1, **SETUP)  # type: ignore[arg-type]
