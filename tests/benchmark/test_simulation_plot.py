"""Plots of simulations."""

import re
from pathlib import Path

import pytest

from localllm.benchmark.simulation_plot import TERMINAL_LANES, draw_gantt, draw_simulation, format_gantt, lanes_of
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.simulate.capacity import Objective
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.report import Report
from localllm.simulate.simulation import simulate
from localllm.simulate.target import roofline_target
from tests.plan.published import LLAMA_8B, header_of


def simulated_report(load: LoadPlan) -> Report:
    options = LoadOptions(4096, 1, None, "auto", "auto")
    target = roofline_target(header_of(LLAMA_8B), find_device("h100"), options, name="llama")
    cost = target.cost
    simulated = simulate(load, target.setup, cost)
    return Report(target, load, None, cost, simulated, Objective({"ttft": 0.5}))


def test_panels(tmp_path: Path) -> None:
    load = LoadPlan(rate=5.0, requests=40, prompt=Lengths(100), output=Lengths(1))  # so TPOT has no values
    report = simulated_report(load)
    file = tmp_path / "simulation.svg"
    draw_simulation(report, file)
    drawn = file.read_text()
    for name in ("Latencies", "Requests", "TTFT by arrival", "KV cache in use", "llama on H100 SXM, simulated"):
        assert f"<!-- {name} -->" in drawn


BUSY = LoadPlan(rate=60.0, requests=300, prompt=Lengths(400, 1.0), output=Lengths(60, 0.5))


@pytest.mark.parametrize("width", [30, 80])
def test_lanes_as_text(width: int) -> None:
    """Each lane has its stages in order, from its arrival to its end, and none is longer than the line."""
    report = simulated_report(BUSY)
    *rows, axis, legend = format_gantt(report, width).plain.splitlines()
    lanes = lanes_of(report.simulated.records, TERMINAL_LANES)
    assert len(rows) == len(lanes) == TERMINAL_LANES and max(map(len, (*rows, axis, legend))) <= width
    slowest = report.simulated.measure("ttft").max()
    assert max(lane.first - lane.arrival for lane in lanes) == pytest.approx(slowest)
    for row, lane in zip(rows, lanes, strict=True):
        assert re.fullmatch(rf" *{lane.number} +·*█+━*( +[\d.]+ m?s)?", row), row
    assert legend == "· queue  █ prefill  ━ decode"


def test_lanes_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lanes.svg"
    draw_gantt(simulated_report(BUSY), file)
    drawn = file.read_text()
    for name in ("queue", "prefill", "decode", "request, by arrival"):
        assert f"<!-- {name} -->" in drawn
