"""Formats numbers and text for readers."""

import math
import re
from collections.abc import Mapping, Sequence

from localllm.errors import CONTROL_PICTURES, ONE_LINE_PICTURES, UsageError


def printable(text: str) -> str:
    """Replace control characters, except tabs and line breaks."""
    return text.translate(CONTROL_PICTURES)


def one_line(text: str) -> str:
    """Make any text, such as a name or a title, printable in one line."""
    return text.translate(ONE_LINE_PICTURES)


def format_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values in two aligned columns, identical in a terminal and in a pipe."""
    return format_table([(f"{name} ", value) for name, value in rows])


def format_table(rows: Sequence[Sequence[str]], alignments: str = "") -> str:
    """Return columns as wide as their widest cells; alignments: `<` or `>` for each column, by default left."""
    rows = [[one_line(cell) for cell in row] for row in rows]  # some are untrusted
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cell_formats = [
        f"{side}{width}" for side, width in zip(alignments.ljust(len(widths), "<"), widths, strict=True)
    ]
    padded = (
        "  ".join(f"{cell:{cell_format}}" for cell, cell_format in zip(row, cell_formats, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in padded)


ROUNDS_TO_ONE = 0.9995  # values that round to 1 with three digits: 999.6 MB is written as 1.00 GB, not as 1000 MB


def format_seconds(value: float) -> str:
    """Three digits and a suitable unit: 850 µs, 12.3 ms, 1.25 s, 20.5 min; `-` if not measured."""
    if math.isnan(value):
        return "-"
    for unit_s, unit in ((3600, "h"), (60, "min")):
        if value >= 2 * unit_s and value >= 600:
            return f"{three_digits(value / unit_s)} {unit}"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= ROUNDS_TO_ONE or value == 0:
            return f"{three_digits(value * factor)} {unit}"
    return f"{value * 1e6:.0f} µs"


def format_moves(moves: Mapping[str, tuple[float, float]]) -> str:
    """Bytes and seconds of moves between tiers of the KV cache, by names such as `disk_to_host`; "" if there were
    none."""
    return ", ".join(
        f"{format_bytes(size)} {name.replace('_', ' ')} in {format_seconds(seconds)}"
        for name, (size, seconds) in moves.items()
        if size
    )


def format_rate(value: float) -> str:
    return "-" if math.isnan(value) else f"{three_digits(value)} tokens/s"


def format_bytes(size_bytes: float) -> str:
    """Bytes in decimal units, as used for disks and on the Hub."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 * ROUNDS_TO_ONE:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{three_digits(size_bytes)} {unit}"
        size_bytes /= 1000
    return f"{three_digits(size_bytes)} TB"


def format_flops(flops_per_s: float) -> str:
    """Operations per second, as in datasheets: 313 GFLOP/s, 1.75 TFLOP/s."""
    unit, name = (1e12, "TFLOP/s") if flops_per_s >= 1e12 * ROUNDS_TO_ONE else (1e9, "GFLOP/s")
    return f"{three_digits(flops_per_s / unit)} {name}"


def format_rough_bytes(size_bytes: float) -> str:
    """Format a number that was rounded to two digits: ~16 GB, ~4.9 GB."""
    number, unit = format_bytes(size_bytes).split()
    return f"~{float(number):g} {unit}"


def format_count(value: float) -> str:
    """Parameter counts as in model cards: 656K, 135M, 1.24B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit * ROUNDS_TO_ONE:
            return f"{value / limit:.3g}{unit}"
    return str(value)


def parse_count(text: str) -> float:
    """Parse `135M` or `1.24B`, as written by `format_count`. Raises ValueError for other text."""
    return float(text[:-1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[text[-1]]


def three_digits(value: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(decimals, 2)}f}"


def parse_duration(text: str) -> float:
    """Return the seconds in `90`, `30s`, `5m`, `1h30m`. Raises UsageError."""
    if match := re.fullmatch(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9}(?:\.\d{1,6})?)s?)?", text):
        hours, minutes, rest = (float(part) if part else 0.0 for part in match.groups())
        if text:
            return 3600 * hours + 60 * minutes + rest
    raise UsageError(f"{text!r} is not a duration", "write for example 30s, 5m or 1h30m")


def parse_bytes(text: str) -> int:
    """Return the bytes in `50GB`, `1.5 TB` or `512MiB`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([KMGT]?)(i?)B?", text, re.IGNORECASE)
    size = 0
    if match:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if not size:
        raise UsageError(f"{text!r} is not a size", "write for example 50GB or 512MiB")
    return size


def format_utc(timestamp: float) -> str:
    """Seconds since 1970 as ISO 8601: 2026-01-31T12:00:00Z."""
    from datetime import UTC, datetime  # imported late: 5 ms that most uses do not need

    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


BACKTICKS = re.compile(r"`{3,}")


def fence_text(text: str, language: str = "") -> str:
    """Return the text as a code block, with a fence longer than any inside it."""
    longest = max((len(run) for run in BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{fence}"
