"""Plots a simulation: distributions of latencies, requests that run and wait, the cache, and TTFT over time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from localllm.benchmark.plot import GREY, draw_panels
from localllm.simulate.report import LABELS, Report, describe_load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DOTS = 4000  # requests that are drawn one by one


def draw_simulation(report: Report, file: Path) -> None:
    """Raises OSError if the file cannot be written."""
    panels: list[Callable[[Axes], None]] = [
        lambda ax: draw_latencies(ax, report),
        lambda ax: draw_requests(ax, report),
        lambda ax: draw_first_tokens(ax, report),
        lambda ax: draw_cache(ax, report),
    ]
    heading = f"{report.target.model} on {report.target.device}, simulated\n"
    draw_panels(panels, heading + describe_load(report.load, report.trace_format), file)


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
