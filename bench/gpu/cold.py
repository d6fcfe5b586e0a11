"""Cold start of an 8B INT4 model, up to the first token: a new process every time, with a generated model on disk.
The first process compiles kernels and fills the kernel cache and the page cache; for the others both are warm.
"""

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
from bench.gpu.setting import Row, Setting
from localllm.benchmark.gpu.generated import SHAPES, TINY

BUDGET_S = 75
STARTS = 4
NEEDED_BYTES = 8 * 10**9


def measure(setting: Setting) -> Iterator[Row]:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < NEEDED_BYTES and not setting.tiny:
        needs = f"{tempfile.gettempdir()} has {free / 1e9:.0f} GB, but needs {NEEDED_BYTES / 1e9:.0f} GB"
        yield {"left out": needs}
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        size = write(folder, TINY if setting.tiny else SHAPES["8B"], setting)
        drop_page_cache(folder)
        runs: list[dict[str, float]] = []
        for i in range(2 if setting.tiny else STARTS):
            runs.append(cold_start(folder, setting, Path(scratch) / "cache"))
            if i == 0:
                yield from phase_rows("nothing warm", runs[0], size)
        medians = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[1]}
        yield from phase_rows(f"all warm, median of {len(runs) - 1}", medians, size)


def drop_page_cache(folder: Path) -> None:
    """Drop the files, which were just written, from the page cache. This has no effect on a tmpfs."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only pages that are on the disk are dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_start(folder: Path, setting: Setting, cache: Path) -> dict[str, float]:
    """Return the seconds of each phase. cache: folder of compiled kernels, empty before the first start."""
    command = [sys.executable, "-m", "bench.gpu.first_token", str(folder), str(setting.device)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    stdout = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    phases: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return phases


def phase_rows(case: str, run: dict[str, float], size: int) -> Iterator[Row]:
    for name, seconds in run.items():
        rate: Row = {"GB/s": size / seconds / 1e9} if name == "load" else {}
        yield {"case": case, "phase": name, "s": seconds, **rate}
    yield {"case": case, "phase": "to the second token", "s": sum(run[name] for name in MARKS[:3])}
