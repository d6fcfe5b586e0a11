"""The cores of this machine's processor: SMT siblings, nodes of memory, and performance or efficiency cores.

Read from Linux's /sys/devices, or from macOS' sysctl. Needs no torch.
"""

import os
import platform
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices")
# Share of the largest capacity, or of the highest clock, that a performance core has. Efficiency cores have a
# capacity of 0.25 to 0.45 on ARM, and a clock of 0.65 as compact cores of Zen 5; Intel lists its own. Clocks of
# performance cores differ by 0.05.
PERFORMANCE_CAPACITY, PERFORMANCE_CLOCK = 0.5, 0.7


@dataclass(frozen=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]  # logical processors that this process may use: SMT siblings
    node: int  # of memory
    is_performance: bool


def read_cores(allowed: Collection[int], system: Path = SYSTEM) -> list[Core]:
    """Return the cores with logical processors that this process may use; empty where the system lists none."""
    efficiency = efficiency_cpus(allowed, system)
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((system / "system" / "node").glob("node[0-9]*"))
        for cpu in read_cpu_list(folder / "cpulist")
    }
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        topology = system / "system" / "cpu" / f"cpu{cpu}" / "topology"
        siblings = read_cpu_list(topology / "core_cpus_list") or read_cpu_list(topology / "thread_siblings_list")
        if not siblings:
            return []
        key = tuple(sibling for sibling in siblings if sibling in allowed)
        cores[key] = Core(key, nodes.get(cpu, 0), cpu not in efficiency)
    return list(cores.values())


def efficiency_cpus(allowed: Collection[int], system: Path) -> set[int]:
    """Return the logical processors of efficiency cores, from the first of three sources that has some."""
    if listed := read_cpu_list(system / "cpu_atom" / "cpus"):  # Intel's hybrids
        return set(listed) if set(allowed) - set(listed) else set()
    for name, share in (("cpu_capacity", PERFORMANCE_CAPACITY), ("cpufreq/cpuinfo_max_freq", PERFORMANCE_CLOCK)):
        values = {cpu: read_number(system / "system" / "cpu" / f"cpu{cpu}" / name) for cpu in allowed}
        numbers = [value for value in values.values() if value is not None]
        slow = {cpu for cpu, value in values.items() if value is not None and value < share * max(numbers)}
        if slow:
            return slow
    return set()


def read_cpu_list(file: Path) -> list[int]:
    """Read a list such as 0-3,8; empty where there is none."""
    try:
        ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
        return [cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)]
    except (OSError, ValueError):
        return []


def read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def count_performance_cores(system: Path = SYSTEM) -> int | None:
    """Return the physical performance cores that this process may use; None where all cores are alike."""
    if platform.system() == "Darwin":
        return read_sysctl("hw.perflevel0.physicalcpu")
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = read_cores(os.sched_getaffinity(0), system)
    count = sum(core.is_performance for core in cores)
    return count if count < len(cores) else None


def read_sysctl(name: str) -> int | None:
    """Read a number from macOS' sysctl; None where it is unknown, as on Macs with a processor of Intel."""
    try:
        return int(subprocess.run(["sysctl", "-n", name], capture_output=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
