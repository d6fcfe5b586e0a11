"""The physical cores of this machine's processors, without efficiency cores.

Read from Linux's /sys/devices, or from macOS' sysctl. Needs no torch.
"""

import os
import platform
import subprocess
from collections.abc import Collection
from pathlib import Path

SYSTEM = Path("/sys/devices")
# Share of the largest capacity, or of the highest clock, that a performance core has. Efficiency cores have a
# capacity of 0.25 to 0.45 on ARM, and a clock of 0.65 as compact cores of Zen 5; Intel lists its own. Clocks of
# performance cores differ by 0.05.
PERFORMANCE_CAPACITY, PERFORMANCE_CLOCK = 0.5, 0.7


def count_cores(system: Path = SYSTEM) -> int | None:
    """Return the cores that this process may use, without efficiency cores; None if the system lists none.

    SMT siblings are one core: they share the units that multiply and the caches.
    """
    if platform.system() == "Darwin":
        return read_sysctl("hw.perflevel0.physicalcpu")
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    fast = allowed - efficiency_cpus(allowed, system)
    cores = {sibling_cpus(cpu, system) for cpu in fast}
    return len(cores) if all(cores) else None


def sibling_cpus(cpu: int, system: Path) -> tuple[int, ...]:
    """Return the logical processors of a processor's core; empty if the system does not list them."""
    topology = system / "system" / "cpu" / f"cpu{cpu}" / "topology"
    names = ("core_cpus_list", "thread_siblings_list")  # the second before Linux 5.3
    return next((tuple(cpus) for name in names if (cpus := read_cpu_list(topology / name))), ())


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
    """Read a list such as 0-3,8; empty if there is none."""
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


def read_sysctl(name: str) -> int | None:
    """Read a number from macOS' sysctl; None if it is unknown, as on Macs with a processor of Intel."""
    try:
        return int(subprocess.run(["sysctl", "-n", name], capture_output=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
