"""Plots a result: speed over streams, lengths and depths if there are several, the gaps between an answer's
tokens, and the fraction of the roofline. matplotlib is an extra, so it is imported inside functions.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.benchmark.result import BenchmarkResult, ModelResult, ScenarioResult
from localllm.benchmark.summary import Distribution
from localllm.errors import UsageError
from localllm.metrics import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
COLUMNS = 2  # number of panel columns
WIDTH, HEIGHT, HEAD = 5.6, 3.8, 0.6  # inches: size of a panel, and space above all
DOTS = 150  # per inch of a PNG
MAX_LINES = 6  # of gaps, which are close together
GREY = "0.4"
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "svg.hashsalt": "localllm",  # makes SVG output reproducible
}
WORDS = {"prompt": "prompt", "depth": "depth", "batch": "streams", "output": "answer"}

Pair = tuple[ModelResult, ScenarioResult]
Panel = Callable[["Axes"], None]


def check_plot(file: Path) -> None:
    """Raises UsageError, before any measurement, if the file could not be written."""
    if file.suffix.lower() not in FORMATS:
        raise UsageError(f"{file} is neither a PNG nor an SVG file", "use a name that ends in .png or .svg")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", "create it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which is not installed", "pip install 'localllm[plot]'")


def draw_result(result: BenchmarkResult, file: Path) -> None:
    """Raises OSError if the file cannot be written."""
    draw_panels(list(result_panels(result)), title(result), file)


def draw_panels(panels: list[Panel], title: str, file: Path, size: tuple[float, float] = (WIDTH, HEIGHT)) -> None:
    """Draw panels side by side. size: of each, in inches. Raises OSError if the file cannot be written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    svg = file.suffix.lower() == ".svg"
    with rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows + HEAD), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, ax in zip(panels, axes, strict=False):
            panel(ax)
        for ax in axes[len(panels) :]:
            ax.remove()
        figure.suptitle(title, fontsize=9, color=GREY)
        figure.savefig(file, dpi=DOTS, metadata={"Date": None} if svg else None)


def title(result: BenchmarkResult) -> str:
    loaded = result.models[0].loaded
    threads = "" if loaded.threads is None else f", threads: {loaded.threads}"
    models = ", ".join(dict.fromkeys(model.loaded.name for model in result.models))
    setup = f"{loaded.device_name}{threads}, localllm {result.machine.versions['localllm']}, {result.date}"
    return "\n".join([f"{models} in {loaded.dtype}", setup, *result.warnings])


def result_panels(result: BenchmarkResult) -> Iterator[Panel]:
    """Yield the panels that have data."""
    pairs = [(edition, measured) for edition in result.models for measured in edition.scenarios]
    for field, name, x, value in (
        ("batch", "Decoding, all streams", "streams", lambda measured: measured.decode_tokens_per_s),
        ("prompt", "Prefill", "tokens of the prompt", lambda measured: measured.prefill_tokens_per_s),
        (
            "depth",
            "Decoding behind a context",
            "tokens in the cache",
            lambda measured: measured.decode_tokens_per_s,
        ),
    ):
        if len({getattr(measured.scenario, field) for _, measured in pairs}) > 1:
            yield line_panel(pairs, field, value, x, name)
    yield itl_panel(pairs)
    yield roofline_panel(pairs)


def line_panel(
    pairs: list[Pair], field: str, value: Callable[[ScenarioResult], Distribution], x: str, name: str
) -> Panel:
    """Plot values over one field, with a line for each combination of the others; bars span the rounds' range."""
    series: dict[str, list[tuple[int, Distribution]]] = {}
    for (_, result), label in zip(pairs, pair_labels(pairs, without=field), strict=True):
        series.setdefault(label, []).append((getattr(result.scenario, field), value(result)))

    def panel(ax: Axes) -> None:
        for label, points in series.items():
            measured = sorted((x_value, speed) for x_value, speed in points if not math.isnan(speed.p50))
            xs, medians = [x_value for x_value, _ in measured], [speed.p50 for _, speed in measured]
            errors = (
                [speed.p50 - speed.low for _, speed in measured],
                [speed.high - speed.p50 for _, speed in measured],
            )
            ax.errorbar(xs, medians, yerr=errors, marker="o", markersize=4, capsize=3, label=label)
        ax.set(title=name, xlabel=x, ylabel="tokens/s")
        ax.set_xticks(sorted({x_value for points in series.values() for x_value, _ in points}))
        ax.set_ylim(bottom=0)
        add_legend(ax, list(series))

    return panel


def itl_panel(pairs: list[Pair]) -> Panel:
    """Plot gaps at each position of the answers, over rounds and streams: median, and 5th to 95th percentile."""
    some = pairs[:: -(-len(pairs) // MAX_LINES)]
    note = f", {len(some)} of {len(pairs)} scenarios" if len(some) < len(pairs) else ""

    def panel(ax: Axes) -> None:
        for (_, measured), label in zip(some, pair_labels(some), strict=True):
            answers = [answer.metrics.itl_s for answers in measured.rounds for answer in answers]
            gaps_by_position = [[1e3 * gap for gap in gaps] for gaps in zip(*answers, strict=True)]
            x = range(2, len(gaps_by_position) + 2)
            [line] = ax.plot(x, [percentile(gaps, 50) for gaps in gaps_by_position], label=label)
            band = (
                [percentile(gaps, 5) for gaps in gaps_by_position],
                [percentile(gaps, 95) for gaps in gaps_by_position],
            )
            ax.fill_between(x, *band, alpha=0.15, color=line.get_color(), linewidth=0)
        ax.set(title=f"Gaps between tokens (ITL){note}", xlabel="token of the answer", ylabel="ms")
        ax.set_ylim(bottom=0)
        add_legend(ax, pair_labels(some))

    return panel


def roofline_panel(pairs: list[Pair]) -> Panel:
    """Plot fractions of the roofline by phase, labelled with the bounds."""
    names = pair_labels(pairs)

    def panel(ax: Axes) -> None:
        small = max(4, min(7, 110 // len(pairs)))
        for shift, phase, colour in ((-0.2, "prefill", "C1"), (0.2, "decoding", "C0")):
            for row, (_, measured) in enumerate(pairs):
                if roof := measured.prefill if phase == "prefill" else measured.decode:
                    ax.barh(row + shift, 100 * roof.of_roof, 0.36, color=colour, label="" if row else phase)
                    text_label = f" {roof.of_roof:.0%} {roof.bound}"
                    ax.text(100 * roof.of_roof, row + shift, text_label, va="center", fontsize=small)
        ax.set_yticks(range(len(pairs)), names, fontsize=small)
        ax.invert_yaxis()
        ax.axvline(100, color=GREY, linestyle="--", linewidth=1)
        ax.set_xlim(0, max(120, 1.2 * ax.get_xlim()[1]))
        ax.set(title="Fraction of the measured roofline", xlabel="%")
        ax.legend(fontsize=7, loc="lower right")

    return panel


def pair_labels(pairs: list[Pair], without: str = "") -> list[str]:
    """Label each pair by the fields in which they differ, except `without`."""
    named = [{"": edition.loaded.name, **vars(measured.scenario)} for edition, measured in pairs]
    differ = [field for field in ("", *WORDS) if field != without and len({str(one[field]) for one in named}) > 1]
    return [", ".join(f"{WORDS.get(field, '')} {one[field]}".strip() for field in differ) for one in named]


def add_legend(ax: Axes, shown: list[str]) -> None:
    """Add a legend if there is more than one line."""
    if len(set(shown)) > 1:
        ax.legend(fontsize=7, framealpha=0.6)
