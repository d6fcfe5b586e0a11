"""What a person reads about an answer: the block that `--verbose` prints, and facts in columns."""

import math
from collections.abc import Sequence

from localllm.metrics import Metrics


def seconds(value: float) -> str:
    """Three digits and a unit that fits: 850 µs, 12.3 ms, 1.25 s; `-` where nothing was measured."""
    if math.isnan(value):
        return "-"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1 or value == 0:
            return f"{three_digits(value * factor)} {unit}"
    return f"{value * 1e6:.0f} µs"


def rate(value: float) -> str:
    return "-" if math.isnan(value) else f"{three_digits(value)} tokens/s"


def size(count: float) -> str:
    """Bytes in decimal units, as disks and the Hub count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{three_digits(count)} {unit}"
        count /= 1000
    return f"{three_digits(count)} TB"


def operations(per_s: float) -> str:
    """Arithmetic in a second, as datasheets have it: 313 GFLOP/s, 1.75 TFLOP/s."""
    unit, name = (1e12, "TFLOP/s") if per_s >= 1e12 else (1e9, "GFLOP/s")
    return f"{three_digits(per_s / unit)} {name}"


def rough_size(count: float) -> str:
    """Of a number that was rounded to two digits: ~16 GB, ~4.9 GB."""
    number, unit = size(count).split()
    return f"~{float(number):g} {unit}"


def count(value: float) -> str:
    """Parameters as model cards write them: 656K, 135M, 1.24B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return str(value)


def three_digits(value: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(decimals, 2)}f}"


def metrics_block(metrics: Metrics, seed: int | None) -> str:
    """Every measurement of one answer, in the words and definitions of `metrics.py`."""
    itl = "  ".join(f"p{percent} {seconds(metrics.itl_percentile(percent))}" for percent in (50, 95, 99))
    return columns(
        [
            ("load", seconds(metrics.load_s)),
            ("queue", seconds(metrics.queue_s)),
            ("prompt", f"{metrics.prompt_tokens} tokens ({metrics.cached_tokens} cached)"),
            ("prefill", f"{seconds(metrics.prefill_s)}  {rate(metrics.prefill_tokens_per_s)}"),
            ("TTFT", seconds(metrics.ttft_s)),
            ("output", f"{metrics.output_tokens} tokens"),
            ("ITL", itl),
            ("TPOT", seconds(metrics.tpot_s)),
            ("TPS", rate(metrics.tokens_per_s)),
            ("E2E", seconds(metrics.e2e_s)),
            ("peak memory", size(metrics.peak_bytes)),
            ("seed", "-" if seed is None else str(seed)),
        ]
    )


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    return table([(f"{name} ", value) for name, value in rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the same in a terminal and in a pipe."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
