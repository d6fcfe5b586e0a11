"""Prints the result of a benchmark as one JSON line, and optionally appends it to a file in bench/results."""

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from localllm.hardware.device import device_name, resolve_device

RESULTS = Path(__file__).parent / "results"


def describe_device() -> str:
    """Name of the device; for a CPU also the number of threads and the instruction set."""
    device = resolve_device("auto")
    if device.type == "cuda":
        return device_name(device)
    return f"{device_name(device)}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def finish(name: str, result: dict[str, Any], save: bool) -> None:
    """Print the result with date, device and versions. save: also append it to results/<name>.jsonl."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    origin = {"benchmark": name, "date": now, "device": describe_device(), "torch": torch.__version__}
    line = json.dumps(origin | {"commit": commit} | result)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
    print(line)
