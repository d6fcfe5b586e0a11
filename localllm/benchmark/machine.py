"""Describes where a benchmark ran: versions, processor, and the load from other programs during it."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import localllm
from localllm.hardware.device import processor_name, usable_cores

CHECKOUT_ROOT = Path(localllm.__file__).parents[1]
BUSY_SHARE, STOLEN_SHARE = (
    0.05,
    0.01,
)  # shares of processor time above which the machine is considered busy
GIT_TIMEOUT_S = 10.0  # seconds


@dataclass(frozen=True)
class Machine:
    processor: str
    cores: float  # usable
    instructions: str  # vector instructions that torch uses
    memory_bytes: int
    system: str
    versions: dict[str, str]
    commit: str | None  # of the checkout; None if not run from one


def describe_machine() -> Machine:
    return Machine(
        processor_name(),
        usable_cores(),
        torch.backends.cpu.get_cpu_capability(),
        psutil.virtual_memory().total,
        f"{platform.system()} {platform.release()}",
        {
            "localllm": localllm.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        git_commit(CHECKOUT_ROOT),
    )


def git_commit(root: Path) -> str | None:
    """Return the commit of the checkout at `root`, with `-dirty` if files differ; None for any other folder."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root.resolve():
            return None  # installed into another repository
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class Noise:
    """Other load on the machine during the benchmark, which makes results vary from run to run."""

    seconds: float
    load_average: float | None  # of the minute before; None if the system has none
    others: float  # share of all processor time used by other programs
    stolen: float  # share that a virtual machine's host gave to other machines

    @property
    def warning(self) -> str | None:
        """Return a line for the report; None if the machine was quiet."""
        causes = []
        if self.others >= BUSY_SHARE:
            causes.append(f"other programs used {self.others:.0%} of the processors")
        if self.stolen >= STOLEN_SHARE:
            causes.append(f"the host gave {self.stolen:.0%} of them to other machines")
        return (
            f"{' and '.join(causes)} during the benchmark: results on a quiet machine would differ"
            if causes
            else None
        )


class NoiseMeter:
    """Measures from its creation until `stop`."""

    def __init__(self) -> None:
        self.load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self.start = time.perf_counter()
        self.process_start_s = time.process_time()
        self.system_start = psutil.cpu_times()

    def stop(self) -> Noise:
        """Return the load relative to the time of all processors, even if this process may use only some."""
        now, own = psutil.cpu_times(), time.process_time() - self.process_start_s
        stolen = getattr(now, "steal", 0.0) - getattr(self.system_start, "steal", 0.0)
        available = (psutil.cpu_count() or 1) * (time.perf_counter() - self.start)
        busy = sum(busy_seconds(now)) - sum(busy_seconds(self.system_start))
        return Noise(
            time.perf_counter() - self.start,
            self.load_average,
            min(1.0, max(0.0, busy - own) / available),
            min(1.0, max(0.0, stolen) / available),
        )


def busy_seconds(times: object) -> list[float]:
    """Return seconds of processor activity; guests' time is part of users' time."""
    return [getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")]
