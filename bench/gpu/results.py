"""What a run found, kept as it comes in bench/results/<date>-<device>.json, and as tables in a .md beside it.

Each part states its own time, commit and clocks, so that one that runs again on the same day replaces only itself.
"""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu.setting import Row
from localllm.hardware.device import device_name, nvidia_driver

FOLDER = Path(__file__).parents[1] / "results"
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit")


class Results:
    def __init__(self, folder: Path, device: torch.device):
        now = datetime.datetime.now(datetime.UTC)
        name = device_name(device)
        self.file = folder / f"{now.date()}-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.json"
        self.device = device
        self.content: dict[str, Any] = {
            "date": str(now.date()),
            "device": name,
            "memory_bytes": torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
            "driver": nvidia_driver() or clocks(device).get("driver"),
            "torch": torch.__version__,
            "triton": triton_version(),
            "python": sys.version.split()[0],
            "parts": {},
        }
        if self.file.exists():
            self.content["parts"] = json.loads(self.file.read_text())["parts"]
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, part: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.content["parts"][part] = {
            **{"began": now, "commit": commit(), "clocks_before": clocks(self.device), "rows": []},
        }
        self.write()

    def add(self, part: str, row: Row) -> None:
        self.content["parts"][part]["rows"].append(row)
        self.write()

    def end(self, part: str, seconds: float, problem: str | None) -> None:
        """problem: why the part did not come to its end."""
        found = {"seconds": round(seconds, 1), "problem": problem, "clocks_after": clocks(self.device)}
        self.content["parts"][part] |= found
        self.write()

    def write(self) -> None:
        """Whole or not at all, whenever the run is killed."""
        for file, text in (
            (self.file, json.dumps(self.content, indent=1) + "\n"),
            (self.table_file, self.report()),
        ):
            partial = file.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(file)

    @property
    def table_file(self) -> Path:
        return self.file.with_suffix(".md")

    def report(self) -> str:
        c = self.content
        head = f"# {c['device']}, {c['date']}\n\nDriver {c['driver']}, torch {c['torch']}, Triton {c['triton']}.\n"
        return head + "".join(self.section(part) for part in c["parts"])

    def section(self, part: str) -> str:
        """One part as a table."""
        found = self.content["parts"][part]
        told = f"{found['seconds']} s" if "seconds" in found else "not finished"
        clock = [found.get(name, {}).get("clocks.sm", "?") for name in ("clocks_before", "clocks_after")]
        text = (
            f"\n## {part}\n\n{told}, commit {found['commit']}, SM clock {clock[0]} before and {clock[1]} after.\n"
        )
        if found.get("problem"):
            text += f"\n**{found['problem']}**\n"
        return text + (f"\n{table(found['rows'])}" if found["rows"] else "")


def table(rows: list[Row]) -> str:
    """In Markdown; columns in the order in which they first come, empty where a row has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([shown(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def shown(value: str | float | None) -> str:
    match value:
        case None:
            return ""
        case str():
            return value.replace("|", "/")
        case int():
            return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def commit() -> str:
    """With a + where files differ from it; COMMIT says it for a copy without a history."""
    if told := os.environ.get("COMMIT"):
        return told
    git = ["git", "-C", str(FOLDER.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def clocks(device: torch.device) -> dict[str, str]:
    """As the driver tells them, with its version; nothing where it does not."""
    if device.type != "cuda":
        return {}
    query = ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu=driver_version,{','.join(CLOCKS)}"]
    try:
        told = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(("driver", *CLOCKS), told.stdout.strip().split(", "), strict=False))


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__
