"""Stages on several machines that tensor parallelism divides: they have the bits of tensor parallelism on one
machine, and the end of any process ends all of them.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import localllm
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import part_of_model
from localllm.errors import NoSuchDevice, RankFailed, UnsupportedModel
from localllm.llm import find, stage_process
from localllm.parallel.remote import RemoteLeader, RemoteWorker
from localllm.request import Grammar, GrammarKind
from tests.models.families import FAMILIES
from tests.models.proofs import token_ids
from tests.parallel.machines_in_threads import machines_in_threads
from tests.parallel.ranks_in_threads import RanksInThreads
from tests.parallel.test_processes import STORY, is_alive
from tests.parallel.test_shards import with_experts
from tests.parallel.test_workers import (
    GREEDY,
    LONG,
    PROMPT,
    children_of,
    load,
    running_worker,
    stage_of,
    wait_for,
    wait_until,
)
from tests.runtime.kv_cache.test_disk_tier import attach, logits_behind_prefix, prompt_of
from tests.runtime.kv_cache.test_disk_tier import load as load_prefix
from tests.runtime.test_engine import run, sequence
from tests.shared import shared
from tests.tiny import make_checkpoint

IDS = token_ids(70)


def check_bits(path: Path, *shares: float, size: int = 2, **options: Any) -> None:
    """Compare with one machine that has as many processes for each layer."""
    with torch.inference_mode(), RanksInThreads(path, size, context=len(IDS), **options) as ranks:
        expected = {count: ranks.engine.logits(IDS[:count]) for count in (len(IDS), 1, 3)}
    with torch.inference_mode(), machines_in_threads(path, shares, size, len(IDS), **options) as engine:
        for count, logits in expected.items():
            assert logits.std() > 0.1
            assert torch.equal(engine.logits(IDS[:count]), logits)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "Gemma 4, like E2B", "DeepSeek-V3", "LFM2"])
def test_stages_have_the_bits_of_one_machine(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    check_bits(tmp_path, 1.0, 1.0)


def test_three_machines_with_four_processes_each() -> None:
    check_bits(shared("stories260K"), 2.0, 1.0, 1.0, size=4)


def test_whole_experts_on_each_machine(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3-MoE"]
    make_checkpoint(tmp_path, kind, **with_experts(changes, 8))
    check_bits(tmp_path, 1.0, 1.0, whole_experts=True)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5"])
def test_stored_prompts_go_through_the_first_process_of_a_machine(tmp_path: Path, family: str) -> None:
    """Blocks, and recurrent states, of the other processes of each machine are stored and filled again."""
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path / "model", kind, **changes)
    prompt, folder = prompt_of(), tmp_path / "cache"
    with torch.inference_mode(), machines_in_threads(tmp_path / "model", (1.0, 1.0), 2) as engine:
        tier = attach(engine, folder)
        run(engine, [sequence(prompt, max_tokens=1)])
        expected = logits_behind_prefix(engine, [*prompt, 7])
        engine.close()
    assert tier.counts.written_tokens == 200
    with torch.inference_mode(), machines_in_threads(tmp_path / "model", (1.0, 1.0), 2) as engine:
        assert load_prefix(attach(engine, folder), [*prompt, 7]) == 200
        assert torch.equal(logits_behind_prefix(engine, [*prompt, 7]), expected)
        engine.close()
    with torch.inference_mode(), RanksInThreads(tmp_path / "model", 2) as ranks:  # of one machine
        assert load_prefix(attach(ranks.engine, folder), [*prompt, 7]) == 200
        assert torch.equal(logits_behind_prefix(ranks.engine, [*prompt, 7]), expected)
        ranks.engine.close()


def test_the_memory_of_a_machine_is_that_of_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of a CPU's, or that of the fullest of so many GPUs behind the first."""
    free = {"cpu": 24, "cuda:2": 80, "cuda:3": 70, "cuda:4": 75}
    for module in (stage_process, find):
        monkeypatch.setattr(module, "free_bytes", lambda device: free[str(device)])

    def resolve(name: str) -> torch.device:
        if name not in free:
            raise NoSuchDevice(f"there is no device {name}")
        return torch.device(name)

    monkeypatch.setattr(stage_process, "resolve_device", resolve)
    names = {"cuda:2": "A", "cuda:3": "A", "cuda:4": "B"}
    monkeypatch.setattr(stage_process, "processor_features", lambda device: names.get(str(device), "AVX2"))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 2)
    facts = [stage_process.facts_of(*arguments) for arguments in ((cpu, 3), (gpu, 1), (gpu, 2), (gpu, 3))]
    assert [(each["free_bytes"], each["processor"]) for each in facts] == [
        (8, "AVX2"),
        (80, "A"),
        (70, "A"),
        (70, "A, B"),
    ]
    with pytest.raises(NoSuchDevice, match="cuda:5"):
        stage_process.facts_of(gpu, 4)
    worker = RemoteWorker("host", Mock(), "cpu", "cpu", 7, "float32", "")
    assert find.memory_of_stages(cpu, [worker], 3).stage_bytes == (8, 7)
    assert find.memory_of_stages(gpu, [worker], 2).stage_bytes == (70, 7)


# Processes


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    with running_worker(tmp_path_factory.mktemp("worker"), host="127.0.0.2") as started:
        yield started


def processes_of(worker: Any) -> list[int]:
    """Return all processes of a worker's stage, the first one first."""
    first = stage_of(worker)
    return [first, *children_of(first)]


def listens(pid: int) -> bool:
    """Return whether a process listens for connections of TCP."""
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets for fields in lines)


@pytest.mark.slow
def test_two_machines_answer_as_one_with_as_many_processes(process: tuple[str, Path, Any]) -> None:
    address, token, worker = process
    options: dict[str, Any] = {"dtype": "float32", "draft": "lookup", "tensor_parallel": 2}
    ids = list(range(3, 90))
    choice = Grammar(GrammarKind.CHOICE, json.dumps(["red", "green"]))
    chosen = replace(GREEDY, grammar=choice)
    with contextlib.closing(localllm.load("demo", device="cpu", context=512, **options)) as one:
        expected, answer = one.generate(PROMPT, GREEDY).text, one.generate(PROMPT, chosen).text
        logits, vectors = one.logits(ids), one.embed([PROMPT]).vectors
    with contextlib.closing(load("demo", address, token, **options)) as two:
        assert len(processes_of(worker)) == 2
        assert two.generate(PROMPT, GREEDY).text == expected
        assert two.generate(PROMPT, chosen).text == answer in ("red", "green")
        assert torch.equal(two.logits(ids), logits)
        assert (two.embed([PROMPT]).vectors == vectors).all()
        leader = two.worker.engine.runner.model.ranks
        assert isinstance(leader, RemoteLeader)
        header = read_header(two.path)
        parts = [part_of_model(header, two.config, replace(leader.position, rank=rank))[0] for rank in range(4)]
        assert leader.read_bytes == [part.stored_bytes for part in parts[1:]]
        assert max(leader.read_bytes) < 0.3 * header.stored_bytes
        for context in (64, 512):
            two.resize(context)
            assert two.generate(PROMPT, GREEDY).text == expected
    wait_for(token.parent / "log", "in 2 processes")


@pytest.mark.slow
def test_prompts_of_divided_stages_are_found_on_the_disk(process: tuple[str, Path, Any], tmp_path: Path) -> None:
    address, token, _ = process
    options: dict[str, Any] = {"tensor_parallel": 2, "cache_dir": tmp_path}
    with contextlib.closing(load("demo", address, token, **options)) as two:
        expected = two.generate(STORY, GREEDY).text
    with contextlib.closing(localllm.load("demo", device="cpu", context=512, **options)) as one:
        found = one.generate(STORY, GREEDY)
    assert found.text == expected and found.metrics.disk_tokens > 256
    with contextlib.closing(load("demo", address, token, **options)) as two:
        found = two.generate(STORY, GREEDY)
    assert found.text == expected and found.metrics.disk_tokens > 256


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_of_a_worker_ends_the_model_with_an_error(
    process: tuple[str, Path, Any], index: int
) -> None:
    address, token, worker = process
    with contextlib.closing(load("demo", address, token, tensor_parallel=2)) as llm:
        started = processes_of(worker)
        assert listens(worker.pid) and not any(map(listens, started))
        events = llm.stream(PROMPT, LONG)
        next(events)
        os.kill(started[index], signal.SIGKILL)
        began = time.monotonic()
        which = ("its process", "process 2 of 2")[index]
        expected = rf"the worker at {address} failed: {which} has ended \(signal 9, SIGKILL\)"
        with pytest.raises(RankFailed, match=expected):
            list(events)
        assert time.monotonic() - began < 60  # 0.02 s measured; a step may take STEP_S, which is 600
        wait_until(lambda: not any(map(is_alive, started)))
    with contextlib.closing(load("demo", address, token, tensor_parallel=2)) as llm:
        assert llm.generate(PROMPT, GREEDY).text


@pytest.mark.slow
def test_an_idle_process_that_is_killed_ends_the_stage(process: tuple[str, Path, Any]) -> None:
    address, token, worker = process
    with contextlib.closing(load("demo", address, token, tensor_parallel=2)) as llm:
        started = processes_of(worker)
        os.kill(started[1], signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)))
        with pytest.raises(localllm.LocalLLMError, match=r"process 2 of 2 has ended \(signal 9, SIGKILL\)"):
            llm.generate(PROMPT, GREEDY)


@pytest.mark.slow
def test_a_killed_process_of_the_first_machine_frees_its_workers(process: tuple[str, Path, Any]) -> None:
    address, token, worker = process
    with contextlib.closing(load("demo", address, token, tensor_parallel=2)) as llm:
        started = processes_of(worker)
        leader = llm.worker.engine.runner.model.ranks
        assert isinstance(leader, RemoteLeader)
        events = llm.stream(PROMPT, LONG)
        next(events)
        leader.processes[0].kill()
        expected = r"process 2 of 2 on this machine has ended \(signal 9, SIGKILL\)"
        with pytest.raises(RankFailed, match=expected):
            list(events)
    wait_until(lambda: not any(map(is_alive, started)))


@pytest.mark.slow
def test_no_process_is_left_of_a_killed_worker_or_one_that_hangs(tmp_path: Path) -> None:
    with running_worker(tmp_path) as (address, token, worker):
        with contextlib.closing(load("demo", address, token, tensor_parallel=2)):
            started = processes_of(worker)
            os.kill(started[1], signal.SIGSTOP)
        wait_until(lambda: not any(map(is_alive, started)))
        with contextlib.closing(load("demo", address, token, tensor_parallel=2)) as llm:
            events = llm.stream(PROMPT, LONG)
            next(events)
            started = processes_of(worker)
            worker.kill()
            with pytest.raises(RankFailed, match=f"the worker at {address} has ended"):
                list(events)
        wait_until(lambda: not any(map(is_alive, started)))


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(process: tuple[str, Path, Any]) -> None:
    address, token, _ = process
    with pytest.raises(UnsupportedModel, match="7"):
        load("demo", address, token, tensor_parallel=7)
