"""Runs the tests that need a GPU, in groups, each in its own pytest processes.

It is a plugin of pytest in these, too, so that failures are known as they occur, and not only in runs that end.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch

from bench.gpu.setting import Row, Setting

BUDGET_S = 140
STOPPED_AFTER_S = 130  # so that the groups until then are counted
MAX_WORKERS = 8  # processes of pytest-xdist, since most of the time is compilation
WORKER_BYTES = (
    6 * 2**30
)  # of a GPU: a model of 1B in bf16, the tensors of its tests, and CUDA itself, with a reserve
MAX_FAILURES = 12  # shown per group, of different tests
MAX_LENGTH = 200  # of a message, in characters
OUTCOMES = "LOCALLLM_TEST_OUTCOMES"  # number of the file that pytest writes a line to for each outcome
GROUPS = {
    "the loop, graphs on and off, in any batch": ["tests/gpu/test_engine.py"],
    "races between kernels": ["tests/gpu/test_races.py"],
    "kernels as a model calls them": ["tests/gpu/test_kernels.py"],
    "each kernel for itself": ["tests/runtime/kernels/gpu"],
    "families beside transformers": ["tests/gpu/test_families.py"],
}


def measure(setting: Setting) -> Iterator[Row]:
    end = time.monotonic() + STOPPED_AFTER_S
    groups = {"families beside transformers": ["tests/gpu/test_families.py"]} if setting.tiny else GROUPS
    for name, files in groups.items():
        yield from rows_of_group(name, outcomes(files, worker_count(setting), end))


def worker_count(setting: Setting) -> int:
    """Number of processes that the GPU's memory and the CPU's cores suffice for."""
    cores = min(MAX_WORKERS, os.cpu_count() or 1)
    if setting.device.type != "cuda":
        return cores
    return max(1, min(cores, torch.cuda.mem_get_info(setting.device)[0] // WORKER_BYTES))


def outcomes(files: list[str], processes: int, end: float) -> Iterator[Row]:
    """Run tests until `end` on the monotonic clock, and yield the outcomes of their phases as they are known."""
    parallel = ["-n", str(processes)] if processes > 1 and importlib.util.find_spec("xdist") else []
    # Warnings are errors elsewhere; here they are those of whatever wheels a machine with a GPU has.
    options = ["-q", "--tb=short", "-o", "addopts=", "-W", "default", "-p", "bench.gpu.correct", *parallel]
    readable, writable = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *files],
        pass_fds=[writable],
        env=os.environ | {OUTCOMES: str(writable)},
    )
    os.close(writable)
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        process.terminate()

    timer = threading.Timer(max(0.0, end - time.monotonic()), stop)
    timer.start()
    any_known = False
    try:
        with process, os.fdopen(readable) as lines:
            for line in lines:
                any_known = True
                yield json.loads(line)
    finally:
        timer.cancel()
    if stopped.is_set():
        yield {"ended": f"stopped: all groups have {STOPPED_AFTER_S} s"}
    elif not any_known:
        yield {"ended": f"pytest ended with {process.returncode}"}


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist report to the main process
        config.pluginmanager.register(OutcomeWriter())


class OutcomeWriter:
    """A plugin of pytest that writes what `outcomes` reads."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        message = getattr(getattr(report.longrepr, "reprcrash", None), "message", reason)
        line = {"test": report.nodeid, "outcome": report.outcome, "message": message}
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more
            os.write(int(os.environ[OUTCOMES]), (json.dumps(line) + "\n").encode())


def rows_of_group(name: str, outcomes: Iterable[Row]) -> Iterator[Row]:
    """Yield a row for the first failure of each test, and one for the group at its end."""
    counts, failing, skips = Counter[str](passed=0, failed=0, skipped=0), set[str](), list[str]()
    ended = None
    for each in outcomes:
        if "ended" in each:
            ended = each["ended"]
            continue
        counts[str(each["outcome"])] += 1
        test, message = str(each["test"]), (str(each["message"]).splitlines() or [""])[0][:MAX_LENGTH]
        if each["outcome"] == "skipped":
            skips.append(message)
        elif each["outcome"] == "failed" and len(failing) < MAX_FAILURES and test.split("[")[0] not in failing:
            failing.add(test.split("[")[0])
            yield {"tests": f"  {test.rpartition('::')[2]}", "fault": message}
    fault = ended or (skips[0] if skips and not counts["passed"] else None)
    yield {"tests": name, **counts} | ({"fault": fault} if fault else {})
