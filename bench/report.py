"""What every benchmark ends with: one JSON line on stdout, kept under bench/results/ when asked."""

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def device_name() -> str:
    """The processor by the name it gives itself, and how many cores work."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].split(":")[1].strip() if names else platform.processor()
    return f"{model}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def finish(name: str, result: dict[str, Any], save: bool) -> None:
    """Print the result with where and of what it was measured; `save` appends it to results/<name>.jsonl."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = {"benchmark": name, "date": now, "device": device_name(), "torch": torch.__version__, "commit": commit}
    line = json.dumps(where | result)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
    print(line)
