"""Is what is fast also right? The tests that need a GPU, in groups, each by pytest in processes of its own."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import torch

from bench.gpu.setting import Row, Setting

BUDGET_S = 140
MAX_WORKERS = 8  # processes of pytest-xdist: most of the time kernels are compiled
WORKER_BYTES = 6 * 2**30  # of a GPU: a model of 1B in bf16, what its tests make, and CUDA itself, with a reserve
FAULTS = 8  # that are shown of a group
LENGTH = 200  # characters of a fault
GROUPS = {
    "the loop, graphs on and off, in any batch": ["tests/gpu/test_engine.py"],
    "races between kernels": ["tests/gpu/test_races.py"],
    "kernels as a model calls them": ["tests/gpu/test_kernels.py"],
    "each kernel for itself": ["tests/runtime/kernels/gpu"],
    "families beside transformers": ["tests/gpu/test_families.py"],
}


def measure(setting: Setting) -> Iterator[Row]:
    groups = {"families beside transformers": ["tests/gpu/test_families.py"]} if setting.tiny else GROUPS
    for name, files in groups.items():
        yield from of_group(name, files, workers(setting))


def workers(setting: Setting) -> int:
    """As many processes as the memory of the GPU and the processor's cores are enough for."""
    cores = min(MAX_WORKERS, os.cpu_count() or 1)
    if setting.device.type != "cuda":
        return cores
    return max(1, min(cores, torch.cuda.mem_get_info(setting.device)[0] // WORKER_BYTES))


def of_group(name: str, files: list[str], processes: int) -> Iterator[Row]:
    """One row for all, and one for each of the first faults."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        many = ["-n", str(processes)] if processes > 1 and importlib.util.find_spec("xdist") else []
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *many, f"--junitxml={report}", *files]
        ended = subprocess.run(command, check=False).returncode
        if not report.exists():
            yield {"tests": name, "fault": f"pytest ended with {ended}"}
            return
        yield from told(name, ElementTree.parse(report).getroot())


def told(name: str, report: ElementTree.Element) -> Iterator[Row]:
    cases = list(report.iter("testcase"))
    faults = [(case, fault) for case in cases for fault in (*case.findall("failure"), *case.findall("error"))]
    skips = [skip.get("message", "") for case in cases for skip in case.findall("skipped")]
    passed = len(cases) - len({case for case, _ in faults}) - len(skips)
    counts: Row = {"tests": name, "passed": passed, "failed": len(faults), "skipped": len(skips)}
    yield counts | ({"fault": skips[0]} if skips and not passed else {})
    for case, fault in faults[:FAULTS]:
        lines = fault.get("message", "").splitlines() or [""]
        yield {"tests": f"  {case.get('name')}", "fault": lines[0][:LENGTH]}
