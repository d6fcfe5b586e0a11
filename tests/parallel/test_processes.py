"""Several processes with one model: they answer as one does, and none waits for another that has ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import localllm
from localllm.arch.stages import Position
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import part_of_model
from localllm.errors import LocalLLMError, RankFailed, UnsupportedModel, UsageError
from localllm.llm.kv_transfer import StateExport, StateImport
from localllm.llm.llm import LLM
from localllm.parallel import group
from localllm.parallel.channel import FAILED, Channel
from localllm.parallel.group import ProcessLeader
from localllm.request import Grammar, GrammarKind, SamplingParams

PROMPT = "Once upon a time"
STORY = "Once upon a time there was a little fox who lived in the green forest. " * 20
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with contextlib.closing(localllm.load("demo", dtype="float32", context=512, device="cpu")) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    llm = localllm.load("demo", dtype="float32", context=512, device="cpu", tensor_parallel=2, draft="lookup")
    with contextlib.closing(llm):
        yield llm


@pytest.fixture(scope="module")
def stages() -> Iterator[LLM]:
    """A pipeline of two stages."""
    llm = localllm.load("demo", dtype="float32", context=512, device="cpu", pipeline_parallel=2, draft="lookup")
    with contextlib.closing(llm):
        yield llm


def leader_of(llm: LLM) -> ProcessLeader:
    leader = llm.worker.engine.runner.model.ranks
    assert isinstance(leader, ProcessLeader)
    return leader


def test_greedy_answers_are_equal(one: LLM, two: LLM) -> None:
    assert two.generate(PROMPT, GREEDY).text == one.generate(PROMPT, GREEDY).text


def test_logits_and_embeddings_are_close(one: LLM, two: LLM) -> None:
    ids = list(range(3, 60))
    assert (one.logits(ids) - two.logits(ids)).abs().max() < 1e-4
    assert abs(one.embed([PROMPT]).vectors - two.embed([PROMPT]).vectors).max() < 1e-4


def test_a_pipeline_computes_the_bits_of_one_process(one: LLM, stages: LLM) -> None:
    ids = list(range(3, 60))
    assert stages.generate(PROMPT, GREEDY).text == one.generate(PROMPT, GREEDY).text
    assert torch.equal(one.logits(ids), stages.logits(ids))
    assert (one.embed([PROMPT]).vectors == stages.embed([PROMPT]).vectors).all()


def test_each_stage_reads_its_layers(one: LLM, stages: LLM) -> None:
    [read] = leader_of(stages).read_bytes
    header = read_header(stages.path)
    part, _ = part_of_model(header, stages.config, replace(leader_of(stages).position, rank=1))
    assert read == part.stored_bytes < 0.6 * header.stored_bytes
    assert stages.memory.weights == one.memory.weights  # stages on a CPU share its memory
    assert stages.memory.block_bytes == one.memory.block_bytes


@pytest.mark.parametrize("name", ["two", "stages"])
def test_a_grammar_holds(request: pytest.FixtureRequest, name: str) -> None:
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(["red", "green"]))
    params = SamplingParams(temperature=0, max_tokens=8, grammar=grammar)
    assert request.getfixturevalue(name).generate(PROMPT, params).text in ("red", "green")


def test_each_process_reads_half_and_what_is_shared(one: LLM, two: LLM) -> None:
    [read] = leader_of(two).read_bytes
    assert read <= 0.51 * one.memory.weights.total  # norms are shared


@pytest.mark.parametrize("name", ["two", "stages"])
def test_caches_are_resized_in_all_processes(request: pytest.FixtureRequest, one: LLM, name: str) -> None:
    expected, llm = one.generate(PROMPT, GREEDY).text, request.getfixturevalue(name)
    for context in (64, 512):
        llm.resize(context)
        assert llm.context == context
        assert llm.generate(PROMPT, GREEDY).text == expected


@pytest.mark.parametrize("name", ["two", "stages"])
def test_nothing_is_recorded_as_if_by_one_process(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    two: LLM = request.getfixturevalue(name)
    two.generate(PROMPT, GREEDY)
    two.record_steps(tmp_path, print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["two", "stages"])
def test_a_saved_state_is_restored(request: pytest.FixtureRequest, one: LLM, name: str) -> None:
    llm, ids = request.getfixturevalue(name), one.tokenizer.encode(STORY)
    told = llm.generate(ids, GREEDY)
    export = StateExport(llm, [*ids, *told.token_ids], "", "")
    state = b"".join(bytes(chunk) for chunks in export for chunk in chunks)
    assert export.tokens >= len(ids) > 256
    llm.worker.call(lambda: llm.worker.engine.pool.forget([*ids, *told.token_ids], ""))
    assert llm.generate(ids, GREEDY).metrics.cached_tokens == 0
    llm.worker.call(lambda: llm.worker.engine.pool.forget([*ids, *told.token_ids], ""))
    restore(llm, state)
    again = llm.generate(ids, GREEDY)
    assert again.metrics.cached_tokens > 256 and again.token_ids == told.token_ids
    if name == "stages":  # have its bits
        restore(one, state)
        again = one.generate(ids, GREEDY)
        assert again.metrics.cached_tokens > 256 and again.token_ids == told.token_ids
    else:
        with pytest.raises(UsageError, match="another division among processes"):
            restore(one, state)


def restore(llm: LLM, state: bytes) -> None:
    received = StateImport(llm, "", "")
    for content in received.add(state):
        received.install(content)
    received.finish()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_prompts_are_found_on_the_disk_after_a_restart(tmp_path: Path, processes: dict[str, int]) -> None:
    def ask(**options: object) -> tuple[str, int]:
        options |= processes
        with contextlib.closing(
            localllm.load("demo", context=512, device="cpu", **options)  # type: ignore[arg-type]
        ) as llm:
            answer = llm.generate(STORY, GREEDY)
            return answer.text, answer.metrics.disk_tokens

    text, _ = ask()
    assert ask(cache_dir=tmp_path) == (text, 0)
    found, from_disk = ask(cache_dir=tmp_path)
    assert found == text and from_disk > 256


@pytest.mark.slow
def test_waiting_for_the_caches_of_a_killed_process_ends() -> None:
    with contextlib.closing(localllm.load("demo", device="cpu", tensor_parallel=2)) as llm:
        ids = llm.tokenizer.encode(STORY)
        llm.generate(ids, GREEDY)
        [process] = leader_of(llm).processes
        process.send_signal(signal.SIGSTOP)
        export = StateExport(llm, ids, "", "")
        threading.Timer(0.2, process.send_signal, [signal.SIGKILL]).start()
        with pytest.raises(RankFailed, match=r"process 2 of 2 has ended \(signal 9, SIGKILL\)"):
            list(export)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_layout": True}, "layout of divided weights"),
        ({"tensor_parallel": 0}, "not a number of processes"),
        ({"tensor_parallel": 1, "expert_parallel": True}, "among the processes of --tensor-parallel"),
        ({"expert_parallel": True}, "no experts to divide"),
        ({"pipeline_parallel": "some"}, "not a number of stages"),
        ({"pipeline_parallel": 33}, "66 is not a number of processes"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises((UsageError, UnsupportedModel), match=message):
        localllm.load("demo", device="cpu", **{"tensor_parallel": 2} | options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_a_killed_process_ends_the_model_with_an_error(field: str, running: bool) -> None:
    llm = localllm.load("demo", device="cpu", **{field: 2})  # type: ignore[arg-type]
    with contextlib.closing(llm):
        [process] = leader_of(llm).processes
        events = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        if running:
            next(events)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"process 2 of 2 has ended \(signal 9, SIGKILL\)"):
            list(events)
        with pytest.raises(localllm.LocalLLMError, match="process 2 of 2 has ended"):
            llm.generate(PROMPT, GREEDY)


FAILURE = json.dumps({"error": "DoesNotFit", "message": "9 GB are needed", "remedy": "use less"}).encode()


@pytest.mark.parametrize(
    ("sent", "codes", "said"),
    [
        (b"", (3, None), "process 2 of 3 has ended (exit code 3)"),
        (FAILURE, (None, None), "process 2 of 3 failed: 9 GB are needed"),
        (FAILURE, (None, -9), "process 3 of 3 has ended (signal 9, SIGKILL)"),  # which another one has noticed
    ],
)
def test_what_is_said_of_a_process_that_ends(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, codes: tuple[int | None, ...], said: str
) -> None:
    """sent: as its last message; codes: of the exits of both other processes"""
    monkeypatch.setattr(group, "KILL_NOTICE_S", 0.05)
    monkeypatch.setattr(group, "EXIT_WAIT_S", 0.0)
    for is_loading in (True, False):
        leader, pair = ProcessLeader(Position(0, 3), torch.device("cpu")), socket.socketpair()
        leader.processes = [Mock(poll=lambda code=code: code, wait=lambda _, code=code: code) for code in codes]
        leader.channels = {1: Channel(pair[0])}
        if sent:
            Channel(pair[1]).send(FAILED, sent)
        pair[1].close()
        with contextlib.closing(leader):
            if is_loading:
                reported = "process 2 of 3: 9 GB are needed" if sent else said
                with pytest.raises(LocalLLMError, match=re.escape(reported)):
                    leader.receive_from_all()
                continue
            with pytest.raises(RankFailed, match=r"a step of 3 processes failed: .*; load the model again"):
                leader.send_caches(1, 1, 1, 1)  # before it is noticed
            leader.watch(1, leader.channels[1])
            with pytest.raises(RankFailed, match=re.escape(said)):
                leader.send_caches(1, 1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_first(tmp_path: Path, number: int) -> None:
    script = (
        "import localllm, time\n"
        "llm = localllm.load('demo', device='cpu', tensor_parallel=2)\n"
        "print(llm.worker.engine.runner.model.ranks.processes[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as first:
        assert first.stdout
        other = int(first.stdout.readline())
        first.send_signal(number)
        first.wait(60)
    deadline = time.monotonic() + 60
    while is_alive(other) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(other)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_the_death_of_a_middle_stage_is_what_is_reported() -> None:
    with contextlib.closing(localllm.load("demo", device="cpu", pipeline_parallel="2,1,1,1")) as llm:
        events = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        next(events)
        leader_of(llm).processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"process 3 of 4 has ended \(signal 9, SIGKILL\)"):
            list(events)


@pytest.mark.slow
def test_a_deterministic_pipeline_has_the_bits_of_one_process() -> None:
    answers = []
    for count in (1, 2):
        llm = localllm.load("demo", device="cpu", context=512, deterministic=True, pipeline_parallel=count)
        with contextlib.closing(llm):
            assert llm.deterministic
            answers.append(llm.logits(list(range(3, 90))))
    assert torch.equal(*answers)


@pytest.mark.slow
def test_deterministic_ranks_have_the_same_bits_for_any_chunks() -> None:
    ids = list(range(3, 90))
    with contextlib.closing(
        localllm.load("demo", device="cpu", context=512, deterministic=True, tensor_parallel=2)
    ) as two:
        assert two.deterministic
        logits = two.logits(ids)
        for count in (1, 7, 40):
            assert torch.equal(two.logits(ids[:count]), logits[:count])


@pytest.mark.slow
def test_the_command_answers_as_with_one_process() -> None:
    def answer(*flags: str) -> str:
        command = [sys.executable, "-m", "localllm", "run", "demo", "--local", "--temperature", "0", *flags, "hi"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout

    alone = answer()
    assert answer("--tensor-parallel", "2") == alone
    assert answer("--pipeline-parallel", "3,2") == alone


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_four_processes_answer_as_one(one: LLM, sizes: tuple[int, int]) -> None:
    tensor, pipeline = sizes
    with contextlib.closing(
        localllm.load(
            "demo",
            dtype="float32",
            context=512,
            device="cpu",
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )
    ) as four:
        assert len(leader_of(four).processes) == 3
        assert four.generate(PROMPT, GREEDY).text == one.generate(PROMPT, GREEDY).text
