"""Stores the results of a run as they arrive, in bench/results/<date>-<device>.json and as tables in <same
name>.md.

Every part has its own time, commit and clocks, so that a part that runs again on the same day replaces only
itself.
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
            **{"began": now, "commit": current_commit(), "clocks_before": clocks(self.device), "rows": []},
        }
        self.write()

    def add(self, part: str, row: Row) -> None:
        self.content["parts"][part]["rows"].append(row)
        self.write()

    def end(self, part: str, seconds: float, problem: str | None) -> None:
        """problem: the reason if the part did not complete."""
        outcome = {"seconds": round(seconds, 1), "problem": problem, "clocks_after": clocks(self.device)}
        self.content["parts"][part] |= outcome
        self.write()

    def write(self) -> None:
        """Write both files atomically, since the run may be killed at any time."""
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
        """One part in Markdown."""
        content = self.content["parts"][part]
        time = f"{content['seconds']} s" if "seconds" in content else "not finished"
        before, after = (content.get(f"clocks_{when}", {}).get("clocks.sm", "?") for when in ("before", "after"))
        text = f"\n## {part}\n\n{time}, commit {content['commit']}, SM clock {before} before and {after} after.\n"
        if content.get("problem"):
            text += f"\n**{content['problem']}**\n"
        return text + (f"\n{table(content['rows'])}" if content["rows"] else "")


def table(rows: list[Row]) -> str:
    """Markdown table, with columns in the order of their first occurrence."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([format_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def format_cell(value: str | float | None) -> str:
    match value:
        case None:
            return ""
        case str():
            return value.replace("|", "/")
        case int():
            return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def current_commit() -> str:
    """Current commit, with a + if files differ from it. The variable COMMIT overrides it, for copies without a
    repository.
    """
    if commit := os.environ.get("COMMIT"):
        return commit
    git = ["git", "-C", str(FOLDER.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def clocks(device: torch.device) -> dict[str, str]:
    """Clocks and limits reported by the driver, and its version; empty if nvidia-smi fails."""
    if device.type != "cuda":
        return {}
    query = ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu=driver_version,{','.join(CLOCKS)}"]
    try:
        process = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(("driver", *CLOCKS), process.stdout.strip().split(", "), strict=False))


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__
