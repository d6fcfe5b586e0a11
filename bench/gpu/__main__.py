"""Runs parts one after another, each in a process of its own that is stopped when its time is over, and keeps what
they found. bench/gpu.sh says how to call it."""

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
    """Rows are kept as they come -> why the part did not come to its end."""
    results.begin(part)
    budget, start = budget_s(part), time.perf_counter()
    command = [sys.executable, "-m", "bench.gpu.part", part, device, *(["--tiny"] if tiny else [])]
    stopped = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:

        def stop() -> None:
            stopped.set()
            end(process.pid)

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


def end(process_group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all, if none is named")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="tiny shapes, and nothing is kept")
    options.add_argument("--results", type=Path, help="keep the results in this folder")
    chosen = options.parse_args(arguments)
    if unknown := set(chosen.parts) - set(PARTS):
        options.error(f"there is no part {unknown.pop()!r}: name some of {', '.join(PARTS)}")
    try:
        device = resolve_device(chosen.device)
    except (NoSuchDevice, UsageError) as error:
        remedy = "name a GPU that is here, or try the harness with --tiny --device cpu"
        print(f"error: {error.message}; {remedy}", file=sys.stderr)
        return 3
    if device.type != "cuda" and not chosen.tiny:
        options.error("a processor is measured with --tiny alone")
    if chosen.tiny:
        print("tiny models under the names of real ones: the harness is tried, nothing is measured", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.results or (Path(scratch) if chosen.tiny else FOLDER)
        results = Results(folder, device)
        problems = 0
        for part in with_kernels(chosen.parts or PARTS):
            problems += bool(run(part, chosen.device, chosen.tiny, results))
            print(results.section(part), flush=True)
        if not chosen.tiny:
            print(f"kept in {results.file} and {results.table_file.name}")
    return int(problems > 0)


if __name__ == "__main__":
    raise SystemExit(main())
