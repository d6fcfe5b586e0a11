"""Runs the tests that need a GPU, in groups, each in its own pytest processes."""

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
MAX_WORKERS = 8  # processes of pytest-xdist, since most of the time is compilation
WORKER_BYTES = (
    6 * 2**30
)  # of a GPU: a model of 1B in bf16, the tensors of its tests, and CUDA itself, with a reserve
MAX_FAILURES = 8  # shown per group
MAX_LENGTH = 200  # of a message, in characters
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
        yield from run_group(name, files, worker_count(setting))


def worker_count(setting: Setting) -> int:
    """Number of processes that the GPU's memory and the CPU's cores suffice for."""
    cores = min(MAX_WORKERS, os.cpu_count() or 1)
    if setting.device.type != "cuda":
        return cores
    return max(1, min(cores, torch.cuda.mem_get_info(setting.device)[0] // WORKER_BYTES))


def run_group(name: str, files: list[str], processes: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        parallel = ["-n", str(processes)] if processes > 1 and importlib.util.find_spec("xdist") else []
        # Warnings are errors elsewhere; here they are those of whatever wheels a machine with a GPU has.
        options = ["-q", "-o", "addopts=", "-W", "default", *parallel, f"--junitxml={report}"]
        returncode = subprocess.run([sys.executable, "-m", "pytest", *options, *files], check=False).returncode
        if not report.exists():
            yield {"tests": name, "fault": f"pytest ended with {returncode}"}
            return
        yield from report_rows(name, ElementTree.parse(report).getroot())


def report_rows(name: str, report: ElementTree.Element) -> Iterator[Row]:
    """Convert a JUnit report to one row for the group and one for each of the first failures."""
    cases = list(report.iter("testcase"))
    failures = [(case, error) for case in cases for error in (*case.findall("failure"), *case.findall("error"))]
    skips = [skip.get("message", "") for case in cases for skip in case.findall("skipped")]
    passed = len(cases) - len({case for case, _ in failures}) - len(skips)
    counts: Row = {"tests": name, "passed": passed, "failed": len(failures), "skipped": len(skips)}
    yield counts | ({"fault": skips[0]} if skips and not passed else {})
    for case, error in failures[:MAX_FAILURES]:
        lines = error.get("message", "").splitlines() or [""]
        yield {"tests": f"  {case.get('name')}", "fault": lines[0][:MAX_LENGTH]}
