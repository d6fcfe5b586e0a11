"""Cores of other machines, from copies of their /sys/devices."""

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.hardware.topology import Core, count_performance_cores, read_cores, read_cpu_list
from localllm.runtime.kernels.threads import threads_for

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Writes /sys/devices of a machine: SMT siblings by logical processor, and other files by path."""

    def write(siblings: list[str], files: dict[str, str]) -> Path:
        contents = {f"system/cpu/cpu{cpu}/topology/core_cpus_list": each for cpu, each in enumerate(siblings)}
        for name, content in (contents | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")
        return tmp_path

    return write


def per_cpu(name: str, values: list[int]) -> dict[str, str]:
    return {f"system/cpu/cpu{cpu}/{name}": str(value) for cpu, value in enumerate(values)}


def test_an_intel_hybrid(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two performance cores with siblings, four efficiency cores, whose clocks are close."""
    siblings = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]
    clocks = per_cpu("cpufreq/cpuinfo_max_freq", [5_600_000] * 4 + [4_300_000] * 4)
    system = machine(siblings, {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"} | clocks)
    cores = read_cores(range(8), system)
    assert [core.cpus for core in cores if core.is_performance] == [(0, 1), (2, 3)]
    assert [core.cpus for core in cores if not core.is_performance] == [(4,), (5,), (6,), (7,)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert count_performance_cores(system) == 2
    # Where a process may only use efficiency cores, they are all that counts.
    assert all(core.is_performance for core in read_cores([4, 5], system))
    assert read_cores([1, 2, 3], system)[0] == Core((1,), 0, True)


def test_big_and_little_cores(machine: Machine) -> None:
    system = machine([str(cpu) for cpu in range(8)], per_cpu("cpu_capacity", [250] * 4 + [790] * 3 + [1024]))
    assert [core.is_performance for core in read_cores(range(8), system)] == [False] * 4 + [True] * 4


def test_compact_cores_have_lower_clocks(machine: Machine) -> None:
    clocks = [5_100_000, 4_950_000, 3_300_000, 3_300_000]
    system = machine(["0", "1", "2", "3"], per_cpu("cpufreq/cpuinfo_max_freq", clocks))
    assert [core.is_performance for core in read_cores(range(4), system)] == [True, True, False, False]


def test_two_nodes_of_equal_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"system/node/node0/cpulist": "0,2", "system/node/node1/cpulist": "1,3"}
    system = machine(["0", "1", "2", "3"], nodes | per_cpu("cpu_capacity", [1024] * 4))
    assert [core.node for core in read_cores(range(4), system)] == [0, 1, 0, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert count_performance_cores(system) is None


def test_a_system_that_lists_no_cores(tmp_path: Path) -> None:
    assert read_cores(range(4), tmp_path) == []
    assert count_performance_cores(tmp_path) is None


@pytest.mark.parametrize(("text", "cpus"), [("0-2,5", [0, 1, 2, 5]), ("3", [3]), ("", []), ("x", [])])
def test_lists_of_processors(tmp_path: Path, text: str, cpus: list[int]) -> None:
    (tmp_path / "list").write_text(f"{text}\n")
    assert read_cpu_list(tmp_path / "list") == cpus


def test_macs_name_their_performance_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    answer = subprocess.CompletedProcess([], 0, stdout=b"6\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer)
    assert count_performance_cores() == 6


def test_threads_are_those_of_performance_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.runtime.kernels import threads

    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 16)
    for cores, expected in ((6, 6), (32, 16), (None, 16)):
        monkeypatch.setattr(threads, "performance_cores", lambda cores=cores: cores)
        assert threads_for(10**9, None) == expected
    assert threads_for(10**9, 12) == 12
    assert threads_for(10**6, None) == 1
