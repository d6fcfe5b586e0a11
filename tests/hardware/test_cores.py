"""Cores of other machines, from copies of their /sys/devices."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from localllm.hardware.processor import count_cores, read_cpu_list
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


def count(system: Path, allowed: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Count the cores of a machine of which this process may use some logical processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
    return count_cores(system)


def test_an_intel_hybrid(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two performance cores with siblings, four efficiency cores, whose clocks are close."""
    siblings = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]
    clocks = per_cpu("cpufreq/cpuinfo_max_freq", [5_600_000] * 4 + [4_300_000] * 4)
    system = machine(siblings, {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"} | clocks)
    assert count(system, range(8), monkeypatch) == 2
    assert count(system, [1, 2, 3, 4], monkeypatch) == 2
    # Where a process may only use efficiency cores, they count.
    assert count(system, [4, 5, 6], monkeypatch) == 3


def test_big_and_little_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    system = machine([str(cpu) for cpu in range(8)], per_cpu("cpu_capacity", [250] * 4 + [790] * 3 + [1024]))
    assert count(system, range(8), monkeypatch) == 4


def test_compact_cores_have_lower_clocks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [5_100_000, 4_950_000, 3_300_000, 3_300_000]
    system = machine(["0", "1", "2", "3"], per_cpu("cpufreq/cpuinfo_max_freq", clocks))
    assert count(system, range(4), monkeypatch) == 2


def test_siblings_are_one_core(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors of two cores each; siblings are numbered after all cores."""
    system = machine(["0,4", "1,5", "2,6", "3,7"] * 2, per_cpu("cpu_capacity", [1024] * 8))
    assert count(system, range(8), monkeypatch) == 4
    assert count(system, [0, 1, 4], monkeypatch) == 2
    old = {f"system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1" for cpu in (8, 9)}
    assert count(machine([], old), [8, 9], monkeypatch) == 1


def test_a_system_that_lists_no_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(tmp_path, range(4), monkeypatch) is None


@pytest.mark.parametrize(("text", "cpus"), [("0-2,5", [0, 1, 2, 5]), ("3", [3]), ("", []), ("x", [])])
def test_lists_of_processors(tmp_path: Path, text: str, cpus: list[int]) -> None:
    (tmp_path / "list").write_text(f"{text}\n")
    assert read_cpu_list(tmp_path / "list") == cpus


def test_macs_name_their_performance_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    answer = subprocess.CompletedProcess([], 0, stdout=b"6\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer)
    assert count_cores() == 6


def test_there_are_not_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.runtime.kernels import threads

    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 16)
    for cores, expected in ((6, 6), (32, 16), (None, 16)):
        monkeypatch.setattr(threads, "cores", lambda cores=cores: cores)
        assert threads_for(10**9, None) == expected
    assert threads_for(10**9, 12) == 12
    assert threads_for(10**6, None) == 1
