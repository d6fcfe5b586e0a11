"""Charts of a simulation: its distributions of latencies, requests that run and wait, cache and TTFT over time as
four panels, and its requests as lanes over time, from queue over prefill to decode, as text or in a file.

Lanes are consecutive arrivals around the request that waited longest for its first token, because that is where
something is to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from localllm.benchmark.plot import GREY, HEIGHT, WIDTH, draw_panels
from localllm.formatting import format_seconds
from localllm.simulate.report import LABELS, Report, describe_load
from localllm.simulate.simulation import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DOTS = 4000  # requests that are drawn one by one
TERMINAL_LANES, FILE_LANES = 32, 120
LANE_HEIGHT = 0.09  # inches, in a file
STAGES = (("queue", "·", "yellow", "C1"), ("prefill", "█", "blue", "C0"), ("decode", "━", "green", "C2"))
LEAST_WIDTH, TTFT_WIDTH = 24, 64  # columns: of a picture, and from which there is space for each TTFT


def draw_simulation(report: Report, file: Path) -> None:
    """Raises OSError if the file cannot be written."""
    panels: list[Callable[[Axes], None]] = [
        lambda ax: draw_latencies(ax, report),
        lambda ax: draw_requests(ax, report),
        lambda ax: draw_first_tokens(ax, report),
        lambda ax: draw_cache(ax, report),
    ]
    draw_panels(panels, heading(report), file)


def draw_latencies(ax: Axes, report: Report) -> None:
    """Plot the share of requests within a latency, with objectives as lines."""
    limits = report.objective.limits if report.objective else {}
    for number, name in enumerate(("queue", "ttft", "tpot", "e2e")):
        values = report.simulated.measure(name)
        values = np.sort(values[~np.isnan(values)])
        if not len(values):
            continue
        shares = np.arange(1, len(values) + 1) / len(values) * 100
        ax.plot(np.maximum(values, 1e-6), shares, color=f"C{number}", label=LABELS[name])
        if name in limits:
            ax.axvline(limits[name], color=f"C{number}", linestyle="--", linewidth=1)
    ax.set(title="Latencies", xlabel="seconds", ylabel="% of requests", xscale="log", ylim=(0, 101))
    ax.legend(fontsize=7)


def draw_requests(ax: Axes, report: Report) -> None:
    points = report.simulated.timeline.points
    times = [point[0] for point in points]
    ax.plot(times, [point[1] for point in points], color="C0", label="running")
    ax.plot(times, [point[2] for point in points], color="C1", label="waiting")
    ax.axhline(report.target.setup.max_running, color=GREY, linestyle="--", linewidth=1, label="most running")
    ax.set(title="Requests", xlabel="seconds", ylabel="requests")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=7)


def draw_first_tokens(ax: Axes, report: Report) -> None:
    arrival, ttft = np.array(report.simulated.records.arrival), report.simulated.measure("ttft")
    step = -(-len(ttft) // MAX_DOTS)
    ax.plot(arrival[::step], 1e3 * ttft[::step], ".", markersize=3, color="C0", alpha=0.5)
    ax.set(title="TTFT by arrival", xlabel="seconds", ylabel="ms")
    ax.set_ylim(bottom=0)


def draw_cache(ax: Axes, report: Report) -> None:
    points, blocks = report.simulated.timeline.points, report.target.setup.blocks
    ax.plot([point[0] for point in points], [100 * point[3] / blocks for point in points], color="C2")
    ax.set(title="KV cache in use", xlabel="seconds", ylabel="% of blocks", ylim=(0, 101))


@dataclass(frozen=True)
class Lane:
    """One request, in seconds since the first arrival that is shown."""

    number: int  # by arrival, from 1
    arrival: float
    scheduled: float
    first: float  # token
    last: float

    @property
    def stages(self) -> tuple[tuple[float, float], ...]:
        """Begin and end of each of STAGES."""
        return (self.arrival, self.scheduled), (self.scheduled, self.first), (self.first, self.last)

    def stage_at(self, begin: float, end: float) -> int | None:
        """Return the stage that takes most of a span of time, or prefill if it begins there; None outside."""
        if begin <= self.scheduled < end:
            return 1
        shares = [min(end, until) - max(begin, since) for since, until in self.stages]
        best = int(np.argmax(shares))
        return best if shares[best] > 0 else None


def lanes_of(records: Records, count: int) -> list[Lane]:
    """Return up to `count` consecutive requests around the one with the longest TTFT."""
    columns = [np.array(values) for values in (records.arrival, records.scheduled, records.first, records.last)]
    order = np.argsort(columns[0], kind="stable")
    arrival, scheduled, first, last = (values[order] for values in columns)
    begin = max(0, min(int(np.argmax(first - arrival)) - count // 2, len(order) - count))
    rows = range(begin, min(len(order), begin + count))
    start = arrival[begin]
    return [Lane(i + 1, *(float(values[i] - start) for values in (arrival, scheduled, first, last))) for i in rows]


def format_gantt(report: Report, width: int) -> Text:
    """Return the lanes as lines of up to `width` columns, at least LEAST_WIDTH, with a final line break."""
    width = max(width, LEAST_WIDTH)
    lanes = lanes_of(report.simulated.records, TERMINAL_LANES)
    label = len(str(lanes[-1].number)) + 1
    times = [format_seconds(lane.first - lane.arrival) for lane in lanes] if width >= TTFT_WIDTH else []
    columns = width - label - (max(map(len, times)) + 1 if times else 0)
    cell = max(lane.last for lane in lanes) / columns
    text = Text()
    for index, lane in enumerate(lanes):
        text.append(f"{lane.number:>{label - 1}} ", "dim")
        for stage, cells in groupby(lane.stage_at(i * cell, (i + 1) * cell) for i in range(columns)):
            mark, color = (" ", "") if stage is None else STAGES[stage][1:3]
            text.append(mark * len(list(cells)), color)
        text.append(f" {times[index]}" if times else "")
        text.rstrip()
        text.append("\n")
    end = format_seconds(cell * columns)
    text.append(" " * label + "0" + end.rjust(columns - 1) + (" TTFT" if times else "") + "\n")
    for name, mark, color, _ in STAGES:
        text.append("  " if name != STAGES[0][0] else "")
        text.append(mark, color)
        text.append(f" {name}")
    return text.append("\n")


def draw_gantt(report: Report, file: Path) -> None:
    """Raises OSError if the file cannot be written."""
    lanes = lanes_of(report.simulated.records, FILE_LANES)
    size = 2 * WIDTH, max(HEIGHT, LANE_HEIGHT * len(lanes))
    draw_panels([lambda ax: draw_lanes(ax, lanes)], heading(report), file, size)


def draw_lanes(ax: Axes, lanes: list[Lane]) -> None:
    for stage, (name, _, _, color) in enumerate(STAGES):
        spans = [lane.stages[stage] for lane in lanes]
        ax.barh(
            [lane.number for lane in lanes],
            [end - begin for begin, end in spans],
            left=[begin for begin, _ in spans],
            height=0.8,
            color=color,
            label=name,
        )
    ax.set(title="Requests", xlabel="seconds", ylabel="request, by arrival")
    ax.margins(y=0.01)
    ax.invert_yaxis()
    ax.legend(fontsize=7)


def heading(report: Report) -> str:
    load = describe_load(report.load, report.trace_format)
    return f"{report.target.model} on {report.target.device}, simulated\n{load}"
