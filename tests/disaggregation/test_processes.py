"""Prompts computed in another process: the answers of one, and none is lost when that process ends."""

import contextlib
import dataclasses
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import localllm
from localllm.disaggregation import supervisor
from localllm.disaggregation.connection import PrefillAddress, PrefillProcess
from localllm.disaggregation.prefill_tier import PrefillTier
from localllm.errors import LocalLLMError, UsageError
from localllm.llm.llm import LLM
from localllm.llm.worker import Stream
from localllm.request import ChatRequest, Completion, Grammar, GrammarKind, SamplingParams, ToolUse
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint

DEMO = Path(localllm.__file__).parent / "boxed" / "demo"
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
    streams = [submit(apart, f"cancelled {i}. {TEXT}", max_tokens=500) for i in range(4)]
    for stream in streams:
        stream.close()
    assert complete(apart, "greedy").token_ids
    assert not tier_of(apart).loads
    assert apart.stats().cancelled >= 4
    assert apart.stats().used_blocks == 0


def submit(llm: LLM, prompt: str, max_tokens: int = 8) -> Stream:
    return llm.answer(ChatRequest(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))


@pytest.mark.slow
def test_a_killed_process_loses_no_request_and_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    others = prefill_processes()
    with contextlib.closing(localllm.load("demo", prefill=2, **SETUP)) as llm:  # type: ignore[arg-type]
        tier, processes = tier_of(llm), prefill_processes(others)
        assert len(processes) == 2 and tier.process_counts == (2, 2)
        streams = [submit(llm, f"{i} {TEXT}") for i in range(6)]
        for process in processes:
            process.kill()
            assert list(streams.pop(0))[-1].finish_reason
        assert all(list(stream)[-1].finish_reason for stream in streams)
        wait_for(lambda: tier.process_counts == (2, 2) and len(prefill_processes(others)) == 2)
        assert not set(processes) & set(prefill_processes(others))
        before = handed_over(llm)
        assert list(submit(llm, f"again {TEXT}"))[-1].finish_reason
        assert handed_over(llm) > before
    assert prefill_processes() == others
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    ended = "has ended (signal 9, SIGKILL); others compute its prompts, and it starts again in 1 s"
    assert sorted(lines) == [f"prefill process {number} {ended}" for number in (1, 2)]


def test_a_process_that_always_fails_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "MODULE", "localllm.errors")  # ends at once
    monkeypatch.setattr(supervisor, "MAX_FAILURES", 2)
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 1.0)  # time to connect
    with contextlib.closing(supervisor.PrefillSupervisor(["cpu"])) as started:
        [path] = started.sockets
        waiting = PrefillAddress(1, path, {}, 0).connect()
        with pytest.raises(LocalLLMError, match="prefill process 1 has ended"):
            waiting.wait_until_loaded()
        waiting.channel.close()
        with contextlib.closing(localllm.load("demo", prefill=[path], **SETUP)) as llm:  # type: ignore[arg-type]
            assert list(submit(llm, TEXT))[-1].finish_reason and tier_of(llm).process_counts == (0, 1)
    assert "prefill process 1 has been given up; others compute its prompts" in caplog.text
    assert "prefill process 1 has ended (exit code 0), 2 times in a row; it is not started again" in caplog.text
    assert not started.folder.exists()


def test_a_folder_of_too_long_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(UsageError, match="set TMPDIR to a shorter one"):
        supervisor.PrefillSupervisor(["cpu"])
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_folders_of_killed_processes_are_removed() -> None:
    code = (
        "import os; from localllm.disaggregation.supervisor import PrefillSupervisor; "
        "print(PrefillSupervisor([]).folder, flush=True); os._exit(1)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = Path(result.stdout.strip())
    assert left.is_dir()
    with contextlib.closing(supervisor.PrefillSupervisor([])) as started:
        assert started.folder.is_dir() and not left.exists()


@pytest.fixture(scope="module")
def shared() -> Iterator[supervisor.PrefillSupervisor]:
    """A process that several engines share."""
    with contextlib.closing(supervisor.PrefillSupervisor(["cpu"])) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "DeepSeek-V3", "Gemma 3"])
def test_engines_that_share_a_process_answer_as_one(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes | {"vocab_size": 3072, "max_position_embeddings": 1024})
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    prompts = [[3 + (seed + i * i) % 3000 for i in range(length)] for seed, length in enumerate((300, 470, 161))]
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(contextlib.closing(supervisor.PrefillSupervisor(["cpu"])))
        one, *engines = (
            stack.enter_context(contextlib.closing(localllm.load(tmp_path, prefill=prefill, **SETUP)))  # type: ignore[arg-type]
            for prefill in (0, started.sockets, started.sockets)
        )
        expected = [one.generate(prompt, greedy) for prompt in prompts]
        with ThreadPoolExecutor(6) as threads:
            answers = [[threads.submit(llm.generate, prompt, greedy) for prompt in prompts] for llm in engines]
        for llm, each in zip(engines, answers, strict=True):
            got = [answer.result() for answer in each]
            assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
            assert [answer.logprobs for answer in got] == [answer.logprobs for answer in expected]
            assert handed_over(llm) > 0


ENGINE = f"""
import pathlib, sys, localllm
from localllm.request import ChatRequest, SamplingParams
llm = localllm.load("demo", prefill=list(map(pathlib.Path, sys.argv[1:])), **{SETUP!r})
streams = [llm.answer(ChatRequest(f"{{i}} {TEXT}", SamplingParams(max_tokens=1))) for i in range(40)]
print("ready", flush=True)
for stream in streams:
    list(stream)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_engine_frees_its_memory_and_others_go_on(shared: supervisor.PrefillSupervisor, one: LLM) -> None:
    [path], process = shared.sockets, shared.processes[0].process.pid
    with contextlib.closing(localllm.load("demo", prefill=[path], **SETUP)) as llm:  # type: ignore[arg-type]
        command = [sys.executable, "-c", ENGINE, str(path)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with other:
            assert other.stdout and other.stdout.readline() == b"ready\n"
            assert len(hand_over_maps(process)) == 2
            other.kill()
        assert complete(llm, "greedy").text == complete(one, "greedy").text
        wait_for(lambda: len(hand_over_maps(process)) == 1)
        assert handed_over(llm) > 0


@pytest.mark.slow
def test_an_engine_with_another_setup_is_refused(shared: supervisor.PrefillSupervisor) -> None:
    localllm.load("demo", prefill=shared.sockets, **SETUP).close()  # type: ignore[arg-type]
    with pytest.raises(LocalLLMError, match="it has loaded another kv dtype: float32, not int8"):
        localllm.load("demo", prefill=shared.sockets, kv_dtype="int8", **SETUP)  # type: ignore[arg-type]


def prefill_processes(others: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """The processes for prompts that this one has started, without others."""
    found = list[psutil.Process]()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if supervisor.MODULE in process.cmdline() and process not in others:
                found.append(process)
    return found


def hand_over_maps(process: int) -> list[str]:
    """The shared memory of a process with those that answer."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in lines if "memfd:localllm" in line]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "a model that is divided among processes"),
        ({"cache_dir": "cache"}, "cannot be stored on disk"),
        ({"prefill": 17}, "at most 16"),
        ({"prefill": -1}, "prefill is -1"),
        ({"prefill": [Path("/none/1")]}, "no process for prompts listens at /none/1"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        localllm.load("demo", device="cpu", **{"prefill": 1} | options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_process_that_cannot_load_the_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, before = PrefillAddress.connect, prefill_processes()

    def connect_elsewhere(address: PrefillAddress) -> PrefillProcess:
        return connect(dataclasses.replace(address, setup=address.setup | {"path": "/none"}))

    monkeypatch.setattr(PrefillAddress, "connect", connect_elsewhere)
    with pytest.raises(LocalLLMError, match="prefill process 1: "):
        localllm.load("demo", prefill=1, **SETUP)  # type: ignore[arg-type]
    assert prefill_processes() == before
