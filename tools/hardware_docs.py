"""`python tools/hardware_docs.py` writes the device table into docs/hardware.md; a test fails if it is stale."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.hardware.catalog import device_names, find_device, unsupported_names  # noqa: E402 (this tree, installed or not)

PAGE = ROOT / "docs" / "hardware.md"
SECTION = re.compile(r"(<!-- catalogue -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """Table with one row per device, in the order of the catalogue."""
    rows = [
        "| device | architecture | memory, GB | bandwidth, GB/s | TFLOP/s | watts | source |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for device in map(find_device, device_names()):
        figures = (device.memory_bytes / 1e9, device.bandwidth / 1e9, device.flops / 1e12)
        arch = f"sm_{device.cores.arch}" if device.cores else "-"
        watts = "-" if device.watts is None else f"{device.watts:g}"
        cells = [f"| {device.name}", arch, *(f"{figure:g}" for figure in figures), watts, f"{device.source} |"]
        rows.append(" | ".join(cells))
    names = ", ".join(unsupported_names())
    return "\n".join([*rows, "", f"Too old for the kernels, and refused by `--gpu` and `--device`: {names}."])


def render(page: str) -> str:
    """The page with a current table."""
    return SECTION.sub(lambda m: f"{m[1]}{table()}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
