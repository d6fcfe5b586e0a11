"""Runs the parts of bench/gpu.sh, each in its own process with a time limit, and stores their results."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from bench.gpu.results import FOLDER, Results
from bench.gpu.setting import Part
from localllm.errors import NoSuchDevice, UsageError
from localllm.hardware.device import resolve_device

PARTS = ("compile", "ceilings", "correct", "roofline", "prefill", "rivals", "cold", "kernels")

COMPILED = {"roofline", "prefill", "kernels", "rivals"}  # parts that need what `compile` compiles


def budget_s(part: str) -> int:
    return cast(Part, import_module(f"bench.gpu.{part}")).BUDGET_S


def run(part: str, device: str, tiny: bool, results: Results) -> str | None:
    """Run a part, and store its rows as they arrive. Return the reason if the part did not complete."""
    results.begin(part)
    budget, start = budget_s(part), time.perf_counter()
    command = [sys.executable, "-m", "bench.gpu.part", part, device, *(["--tiny"] if tiny else [])]
    stopped = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:

        def stop() -> None:
            stopped.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(budget, stop)
        timer.start()
        assert process.stdout
        try:
            for line in process.stdout:
                results.add(part, json.loads(line))
            process.wait()
        except BaseException:
            stop()
            raise
        finally:
            timer.cancel()
    problem = f"stopped: it had {budget} s" if stopped.is_set() else None
    if not problem and process.returncode:
        problem = f"failed: it ended with {process.returncode}, its error is on stderr"
    results.end(part, time.perf_counter() - start, problem)
    return problem


def with_kernels(parts: Sequence[str]) -> list[str]:
    """The parts; the kernels of those that are measured with generated models are compiled before them."""
    compiling = "compile" not in parts and not COMPILED.isdisjoint(parts)
    return [*(["compile"] if compiling else []), *parts]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="test the harness with tiny shapes; stores nothing")
    parser.add_argument("--results", type=Path, help="folder to store the results in")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()!r}: use {', '.join(PARTS)}")
    try:
        device = resolve_device(options.device)
    except (NoSuchDevice, UsageError) as error:
        remedy = "name a GPU of this machine, or test the harness with --tiny --device cpu"
        print(f"error: {error.message}; {remedy}", file=sys.stderr)
        return 3
    if device.type != "cuda" and not options.tiny:
        parser.error("a CPU can only be used with --tiny")
    if options.tiny:
        print("tiny models under the names of real ones: a test of the harness, without measurements", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.results or (Path(scratch) if options.tiny else FOLDER)
        results = Results(folder, device)
        problems = 0
        for part in with_kernels(options.parts or PARTS):
            problems += bool(run(part, options.device, options.tiny, results))
            print(results.section(part), flush=True)
        if not options.tiny:
            print(f"stored in {results.file} and {results.table_file.name}")
    return int(problems > 0)


if __name__ == "__main__":
    raise SystemExit(main())
