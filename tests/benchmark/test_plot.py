"""Plots of benchmark results."""

import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from localllm.benchmark import plot
from localllm.benchmark.result import BenchmarkResult
from localllm.benchmark.run import BenchmarkPlan, load_subject, run_benchmark
from localllm.benchmark.scenario import ScenarioGrid
from localllm.errors import UsageError
from localllm.plan.fit import LoadOptions
from localllm.settings import Settings


@pytest.fixture(scope="module")
def result(tiny: Callable[[str], Path], settings: Settings) -> BenchmarkResult:
    edition = load_subject(str(tiny("Llama 3.x")), settings, device=None, options=LoadOptions())
    return run_benchmark([edition], BenchmarkPlan(ScenarioGrid((8, 20), (0, 32), (1, 2), (5,)), 2))


def test_a_png_holds_a_picture(result: BenchmarkResult, tmp_path: Path) -> None:
    from matplotlib import image

    file = tmp_path / "a.PNG"
    plot.draw_result(result, file)
    pixels = image.imread(file, format="png")
    assert min(pixels.shape[:2]) > 500
    assert numpy.ptp(pixels[:, :, :3]) > 0.5  # not of one colour


def test_an_svg_names_all_panels(result: BenchmarkResult, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    plot.draw_result(result, file)
    root = xml.etree.ElementTree.parse(file).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = file.read_text()
    names = (
        "Decoding, all streams",
        "Prefill",
        "Decoding behind a context",
        "Gaps between tokens (ITL), 4 of 8 scenarios",
        "Fraction of the measured roofline",
    )
    assert all(f"<!-- {name} -->" in text for name in names)


def test_only_varying_parameters_are_axes(tiny: Callable[[str], Path], settings: Settings, tmp_path: Path) -> None:
    edition = load_subject(str(tiny("Llama 3.x")), settings, device=None, options=LoadOptions())
    result = run_benchmark([edition], BenchmarkPlan(ScenarioGrid((8,), (0,), (1,), (1,)), 1))  # without any gap
    assert len(list(plot.result_panels(result))) == 2
    plot.draw_result(result, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", ["a.gif", "a", "png"])
def test_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.png or \.svg"):
        plot.check_plot(tmp_path / name)


def test_a_folder_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        plot.check_plot(tmp_path / "nowhere" / "a.png")


def test_without_matplotlib_the_remedy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'localllm\[plot\]'"):
        plot.check_plot(tmp_path / "a.png")
