"""Where a benchmark ran, and how quiet it was there: versions, processor, what other programs took meanwhile."""

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
)  # shares of all processor time from which numbers are not those of a quiet machine
GIT_TIMEOUT_S = 10.0  # for git


@dataclass(frozen=True)
class Machine:
    processor: str
    cores: float  # that may be used
    instructions: str  # that torch takes
    memory_bytes: int
    system: str
    versions: dict[str, str]
    commit: str | None  # of the checkout that ran; None where it was installed otherwise


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
    """Of the checkout whose top `root` is, with `-dirty` behind where files differ; None of anything else."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root.resolve():
            return None  # installed into somebody else's
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class Noise:
    """What happened on the machine beside the benchmark, which is what numbers differ by from run to run."""

    seconds: float
    load_average: float | None  # of the minute before; None where the system counts none
    others: float  # share of all processor time that went to other programs
    stolen: float  # share that the host of a virtual machine gave to others

    @property
    def warning(self) -> str | None:
        """One line; None where the machine was quiet."""
        found = []
        if self.others >= BUSY_SHARE:
            found.append(f"other programs took {self.others:.0%} of the processors")
        if self.stolen >= STOLEN_SHARE:
            found.append(f"the host gave {self.stolen:.0%} of them to other machines")
        return f"{' and '.join(found)} meanwhile: a quiet machine gives other numbers" if found else None


class NoiseMeter:
    """Counts from its making until `stop`."""

    def __init__(self) -> None:
        self.load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self.start = time.perf_counter()
        self.process_start_s = time.process_time()
        self.system_start = psutil.cpu_times()

    def stop(self) -> Noise:
        """All processors' time is what the system counted, also where this process may use only some."""
        now, own = psutil.cpu_times(), time.process_time() - self.process_start_s
        stolen = getattr(now, "steal", 0.0) - getattr(self.system_start, "steal", 0.0)
        whole = (psutil.cpu_count() or 1) * (time.perf_counter() - self.start)
        busy = sum(busy_seconds(now)) - sum(busy_seconds(self.system_start))
        return Noise(
            time.perf_counter() - self.start,
            self.load_average,
            min(1.0, max(0.0, busy - own) / whole),
            min(1.0, max(0.0, stolen) / whole),
        )


def busy_seconds(times: object) -> list[float]:
    """Seconds in which processors did something: guests' are part of the users'."""
    return [getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")]
