"""A stretch of time as columns of a screen. Pure arithmetic."""

import math
from dataclasses import dataclass

from localllm.formatting import format_seconds
from localllm.tui.sparkline import round_up_scale

LABEL_SPACING = 13  # at least from one label to the next
MIN_SPAN_S = 1e-3


@dataclass(frozen=True)
class TimeScale:
    """`width` columns for the seconds from `start_s` on."""

    start_s: float
    span_s: float
    width: int

    @classmethod
    def zoomed(cls, end_s: float, zoom: int, at_s: float, width: int) -> "TimeScale":
        """Half as much of the time until end_s with each zoom, with at_s in it, in the middle where it can be."""
        whole = max(end_s, MIN_SPAN_S)
        span = whole / 2**zoom
        return cls(min(max(at_s - span / 2, 0.0), whole - span), span, width)

    def column(self, at_s: float) -> int:
        """Which may lie outside of 0 to width - 1."""
        return math.floor((at_s - self.start_s) / self.span_s * self.width * (1 - 1e-9))

    def time_at(self, column: float) -> float:
        return self.start_s + self.span_s * column / self.width

    def columns_between(self, begin_s: float, end_s: float) -> range:
        """Those that a stretch of time covers, at least one if any of it is to be seen."""
        first, last = self.column(begin_s), self.column(end_s)
        return range(max(first, 0), min(max(last, first + 1), self.width)) if last >= 0 else range(0)

    def label_row(self) -> str:
        """Times above their columns, each beginning at its own."""
        step = round_up_scale(self.span_s / self.width * LABEL_SPACING)
        row = [" "] * self.width
        at = math.ceil(self.start_s / step - 1e-9) * step
        while (column := max(self.column(at + 1e-12), 0)) < self.width:
            text = "╷" + (format_seconds(at) if at else "0")
            if column + len(text) <= self.width:
                row[column : column + len(text)] = text
            at += step
        return "".join(row)
