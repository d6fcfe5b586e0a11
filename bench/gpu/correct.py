"""Runs the tests that need a GPU, in as many processes as fit.

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
from collections.abc import Generator, Iterable, Iterator

import pytest
import torch

from bench.gpu.setting import Row, Setting

BUDGET_S = 260
STOPPED_AFTER_S = 250  # so that the tests until then are counted
MAX_WORKERS = 16  # processes of pytest-xdist, since most of the time is compilation
WORKER_BYTES = (
    6 * 2**30
)  # of a GPU: a model of 1B in bf16, the tensors of its tests, and CUDA itself, with a reserve
CHUNK = 6  # most tests that a process is given at once: those that take long stand together
MAX_FAILURES = 12  # shown per group, of different tests
MAX_LENGTH = 200  # of a message, in characters
OUTCOMES = "LOCALLLM_TEST_OUTCOMES"  # number of the file that pytest writes a line to for each outcome
GROUPS = {  # the longest first
    "kernels as a model calls them": "tests/gpu/test_kernels.py",
    "the loop, graphs on and off, in any batch": "tests/gpu/test_engine.py",
    "races between kernels": "tests/gpu/test_races.py",
    "families beside transformers": "tests/gpu/test_families.py",
    "each kernel for itself": "tests/runtime/kernels/gpu",
}


def measure(setting: Setting) -> Iterator[Row]:
    families = "families beside transformers"
    groups = {families: GROUPS[families]} if setting.tiny else GROUPS
    end = time.monotonic() + STOPPED_AFTER_S
    yield from rows_of_groups(groups, outcomes(list(groups.values()), worker_count(setting), end))


def worker_count(setting: Setting) -> int:
    """Number of processes that the GPU's memory and the CPU's cores suffice for."""
    cores = min(MAX_WORKERS, os.cpu_count() or 1)
    if setting.device.type != "cuda":
        return cores
    return max(1, min(cores, torch.cuda.mem_get_info(setting.device)[0] // WORKER_BYTES))


def outcomes(files: list[str], processes: int, end: float) -> Iterator[Row]:
    """Run tests until `end` on the monotonic clock, and yield the outcomes of their phases as they are known."""
    xdist = processes > 1 and importlib.util.find_spec("xdist")
    parallel = ["-n", str(processes), "--maxschedchunk", str(CHUNK)] if xdist else []
    # Warnings are errors elsewhere; here they are those of whatever wheels a machine with a GPU has.
    options = ["-q", "--tb=short", "-o", "addopts=", "-W", "default", "-p", "bench.gpu.correct", *parallel]
    readable, writable = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *files],
        pass_fds=[writable],
        env=os.environ | {OUTCOMES: str(writable), "OMP_NUM_THREADS": "1"},  # a process has one core
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
        yield {"ended": f"stopped: all tests have {STOPPED_AFTER_S} s"}
    elif not any_known:
        yield {"ended": f"pytest ended with {process.returncode}"}


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, which reports to the main process
        config.pluginmanager.register(FaultyWorkerEnder())
    else:
        config.pluginmanager.register(OutcomeWriter())


class FaultyWorkerEnder:
    """A plugin of pytest that ends a worker whose GPU has faulted: all that it would run after it would fail, too.
    pytest-xdist starts another.
    """

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        result = yield
        if self.failed and torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(1)
        self.failed = False
        return result


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


def rows_of_groups(groups: dict[str, str], outcomes: Iterable[Row]) -> Iterator[Row]:
    """Yield a row for the first failure of each test, and one for each group at the end.

    groups: names, and the file or folder of their tests
    """
    tests = {name: {outcome: set[str]() for outcome in ("passed", "failed", "skipped")} for name in groups}
    skips = dict[str, str]()
    ended = None
    for each in outcomes:
        if "ended" in each:
            ended = str(each["ended"])
            continue
        test, message = str(each["test"]), (str(each["message"]).splitlines() or [""])[0][:MAX_LENGTH]
        name = next(name for name, path in groups.items() if test.startswith(path))
        failing = {failed.split("[")[0] for failed in tests[name]["failed"]}
        tests[name][str(each["outcome"])].add(test)
        if each["outcome"] == "skipped":
            skips.setdefault(name, message)
        elif each["outcome"] == "failed" and len(failing) < MAX_FAILURES and test.split("[")[0] not in failing:
            yield {"tests": f"  {test.rpartition('::')[2]}", "fault": message}
    for name, ids in tests.items():
        ids["passed"] -= ids["failed"]  # with a fault when it was torn down
        fault = ended or (skips[name] if name in skips and not ids["passed"] else None)
        counts: Row = {outcome: len(each) for outcome, each in ids.items()}
        yield {"tests": name, **counts} | ({"fault": fault} if fault else {})
