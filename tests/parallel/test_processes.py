"""Tensor parallelism in real processes: two answer as one does, and none waits for another that has ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import localllm
from localllm.errors import RankFailed, UsageError
from localllm.llm.kv_transfer import StateExport
from localllm.llm.llm import LLM
from localllm.parallel.group import Leader
from localllm.request import Grammar, GrammarKind, SamplingParams

PROMPT = "Once upon a time"
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


def leader_of(llm: LLM) -> Leader:
    leader = llm.worker.engine.runner.model.ranks
    assert isinstance(leader, Leader)
    return leader


def test_greedy_answers_are_equal(one: LLM, two: LLM) -> None:
    assert two.generate(PROMPT, GREEDY).text == one.generate(PROMPT, GREEDY).text


def test_logits_and_embeddings_are_close(one: LLM, two: LLM) -> None:
    ids = list(range(3, 60))
    assert (one.logits(ids) - two.logits(ids)).abs().max() < 1e-4
    assert abs(one.embed([PROMPT]).vectors - two.embed([PROMPT]).vectors).max() < 1e-4


def test_a_grammar_holds(two: LLM) -> None:
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(["red", "green"]))
    params = SamplingParams(temperature=0, max_tokens=8, grammar=grammar)
    assert two.generate(PROMPT, params).text in ("red", "green")


def test_each_process_reads_half_and_what_is_shared(one: LLM, two: LLM) -> None:
    [read] = leader_of(two).read_bytes
    assert read <= 0.51 * one.memory.weights.total  # norms are shared


def test_caches_are_resized_in_all_processes(one: LLM, two: LLM) -> None:
    expected = one.generate(PROMPT, GREEDY).text
    for context in (64, 512):
        two.resize(context)
        assert two.context == context
        assert two.generate(PROMPT, GREEDY).text == expected


def test_nothing_is_recorded_as_if_by_one_process(two: LLM, tmp_path: Path) -> None:
    two.generate(PROMPT, GREEDY)
    two.record_steps(tmp_path, print)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="receipt describes the computation of one process"):
        two.provenance()
    with pytest.raises(UsageError, match="keys and values of a model in several processes"):
        StateExport(two, [1, 2, 3], "", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "not deterministic"),
        ({"cache_dir": "cache"}, "not stored on the disk"),
        ({"keep_layout": True}, "layout of divided weights"),
        ({"tensor_parallel": 0}, "not a number of processes"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        localllm.load("demo", device="cpu", **{"tensor_parallel": 2} | options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("running", [False, True])
def test_a_killed_process_ends_the_model_with_an_error(running: bool) -> None:
    llm = localllm.load("demo", device="cpu", tensor_parallel=2)
    with contextlib.closing(llm):
        [process] = leader_of(llm).processes
        events = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        if running:
            next(events)
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankFailed, match=r"process 2 of 2 has ended \(signal 9, SIGKILL\)"):
            list(events)
        assert time.monotonic() - began < 8
        with pytest.raises(localllm.LocalLLMError, match="process 2 of 2 has ended"):
            llm.generate(PROMPT, GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_first(tmp_path: Path, number: int) -> None:
    script = (
        "import localllm, time\n"
        "llm = localllm.load('demo', device='cpu', tensor_parallel=2)\n"
        "print(llm.worker.engine.runner.model.ranks.processes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as first:
        assert first.stdout
        other = int(first.stdout.readline())
        first.send_signal(number)
        first.wait(10)
    deadline = time.monotonic() + 10
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
def test_the_command_answers_as_with_one_process() -> None:
    def answer(*flags: str) -> str:
        command = [sys.executable, "-m", "localllm", "run", "demo", "--local", "--temperature", "0", *flags, "hi"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert answer("--tensor-parallel", "2") == answer()


@pytest.mark.slow
def test_four_processes_answer_as_one(one: LLM) -> None:
    with contextlib.closing(
        localllm.load("demo", dtype="float32", context=512, device="cpu", tensor_parallel=4)
    ) as four:
        assert four.generate(PROMPT, GREEDY).text == one.generate(PROMPT, GREEDY).text
