"""Plots of simulations."""

from pathlib import Path

from localllm.benchmark.simulation_plot import draw_simulation
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.simulate.capacity import Objective
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.report import Report
from localllm.simulate.simulation import simulate
from localllm.simulate.target import roofline_target
from tests.plan.published import LLAMA_8B, header_of


def test_panels(tmp_path: Path) -> None:
    options = LoadOptions(4096, 1, None, "auto", "auto")
    target = roofline_target(header_of(LLAMA_8B), find_device("h100"), options, name="llama")
    load = LoadPlan(rate=5.0, requests=40, prompt=Lengths(100), output=Lengths(1))  # so TPOT has no values
    cost = target.cost
    simulated = simulate(load, target.setup, cost)
    report = Report(target, load, None, cost, simulated, Objective({"ttft": 0.5}))
    file = tmp_path / "simulation.svg"
    draw_simulation(report, file)
    drawn = file.read_text()
    for name in ("Latencies", "Requests", "TTFT by arrival", "KV cache in use", "llama on H100 SXM, simulated"):
        assert f"<!-- {name} -->" in drawn
