"""What every benchmark ends with: one JSON line on stdout, kept under bench/results/ when asked."""

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from localllm.hardware.device import device_name, resolve_device

RESULTS = Path(__file__).parent / "results"


def measured_on() -> str:
    """The device by the name it gives itself; of a processor also how many cores work, and with what."""
    device = resolve_device("auto")
    if device.type == "cuda":
        return device_name(device)
    return f"{device_name(device)}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def finish(name: str, result: dict[str, Any], save: bool) -> None:
    """Print the result with where and of what it was measured; `save` appends it to results/<name>.jsonl."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = {"benchmark": name, "date": now, "device": measured_on(), "torch": torch.__version__, "commit": commit}
    line = json.dumps(where | result)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
    print(line)
