"""From nothing to the first token of an 8B INT4 model: a process of its own each time, on an artefact that is
generated and written here. The first process compiles kernels and fills the caches of kernels and of files; the
others find both warm."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.artefact import write
from bench.gpu.first_token import MARKS
from bench.gpu.generated import SHAPES, TINY
from bench.gpu.setting import Row, Setting

BUDGET_S = 75
STARTS = 4
NEEDED_BYTES = 8 * 10**9


def measure(setting: Setting) -> Iterator[Row]:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < NEEDED_BYTES and not setting.tiny:
        yield {"left out": f"{tempfile.gettempdir()} has {free / 1e9:.0f} GB, {NEEDED_BYTES / 1e9:.0f} are needed"}
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        size = write(folder, TINY if setting.tiny else SHAPES["8B"], setting)
        forget(folder)
        runs: list[dict[str, float]] = []
        for i in range(2 if setting.tiny else STARTS):
            runs.append(started(folder, setting, Path(scratch) / "cache"))
            if i == 0:
                yield from phases("nothing warm", runs[0], size)
        middle = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[1]}
        yield from phases(f"all warm, median of {len(runs) - 1}", middle, size)


def forget(folder: Path) -> None:
    """Have the system let go of what it keeps of the files: they were written a moment ago. Where they lie in
    memory it cannot."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # only what is on the disk is let go of
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def started(folder: Path, setting: Setting, cache: Path) -> dict[str, float]:
    """The seconds of each phase. cache: where compiled kernels are kept, and at first none are."""
    command = [sys.executable, "-m", "bench.gpu.first_token", str(folder), str(setting.device)]
    kept = {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | kept).stdout
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def phases(case: str, run: dict[str, float], size: int) -> Iterator[Row]:
    for name, seconds in run.items():
        rate: Row = {"GB/s": size / seconds / 1e9} if name == "load" else {}
        yield {"case": case, "phase": name, "s": seconds, **rate}
    yield {"case": case, "phase": "to the second token", "s": sum(run[name] for name in MARKS[:3])}
