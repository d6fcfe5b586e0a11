"""The harness of bench/gpu.sh with tiny shapes on a CPU; its numbers mean nothing."""

import json
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench.gpu import __main__ as driver
from bench.gpu.artefact import write
from bench.gpu.correct import report_rows
from bench.gpu.generated import SHAPES, TINY, RandomSource, config_of
from bench.gpu.results import Results, table
from bench.gpu.setting import Setting, judged
from localllm.arch.cost import parameter_count
from localllm.quant.dequantize import dequantize
from localllm.quant.packing import INT4, INT8
from tests.tiny import CPU, make_engine

SETTING = Setting(CPU, tiny=True)
MINUTES = 600  # seconds that all parts may take, with what lies between them
VERDICTS = ("goal", "accepted", "below")


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("part", ["ceilings", "roofline", "prefill", "kernels", "rivals"])
def test_a_part_gives_rows_that_a_table_shows(part: str) -> None:
    rows = list(import_module(f"bench.gpu.{part}").measure(SETTING))
    assert len(rows) >= 3
    assert json.loads(json.dumps(rows)) == rows
    assert not [row["left out"] for row in rows if "left out" in row and "cuDNN" not in str(row.get("what"))]
    assert all(row["verdict"] in VERDICTS for row in rows if "verdict" in row)
    assert all(float(value) > 0 for row in rows for name, value in row.items() if name == "GB/s" and value)
    assert table(rows).count("\n") == len(rows) + 2


def test_all_parts_fit_into_ten_minutes() -> None:
    assert sum(map(driver.budget_s, driver.PARTS)) < MINUTES


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own_and_its_rows_are_kept(tmp_path: Path) -> None:
    results = Results(tmp_path, CPU)
    assert driver.run("ceilings", "cpu", True, results) is None
    [file] = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["torch"] == torch.__version__ and found["date"] in file.name
    assert len(found["parts"]["ceilings"]["rows"]) == 3 and found["parts"]["ceilings"]["problem"] is None
    assert "## ceilings" in file.with_suffix(".md").read_text()


def test_a_part_is_stopped_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "budget_s", lambda part: 0.3)
    results, start = Results(tmp_path, CPU), time.perf_counter()
    assert driver.run("roofline", "cpu", True, results) == "stopped: it had 0.3 s"
    assert time.perf_counter() - start < 3
    assert results.content["parts"]["roofline"]["problem"] == "stopped: it had 0.3 s"


def test_a_part_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    problem = driver.run("ceilings", "cpu", True, results := Results(tmp_path, CPU))
    assert problem == "failed: it ended with 1, its error is on stderr"
    assert results.content["parts"]["ceilings"]["problem"] == problem


def test_a_part_that_runs_again_replaces_itself_alone(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        results = Results(tmp_path, CPU)
        for part in ("ceilings", "roofline") if value == 1.0 else ("roofline",):
            results.begin(part)
            results.add(part, {"what": part, "found": value})
            results.end(part, 1.0, None)
    rows = {part: found["rows"] for part, found in results.content["parts"].items()}
    assert rows == {
        "ceilings": [{"what": "ceilings", "found": 1.0}],
        "roofline": [{"what": "roofline", "found": 2.0}],
    }


def test_the_command_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["cooking"], "no part 'cooking'"),
        (["--device", "cpu"], "only be used with --tiny"),
    ):
        with pytest.raises(SystemExit):
            driver.main(arguments)
        assert words in capsys.readouterr().err
    for device in ("cuda:99", "tpu"):
        assert driver.main(["ceilings", "--device", device]) == 3
        output = capsys.readouterr()
        assert re.match("error: (there is no |'tpu' is not a device)", output.err) and not output.out
        assert "--tiny --device cpu" in output.err


def test_generated_weights_are_counted_as_a_step_reads_them() -> None:
    config = config_of(SHAPES["8B"], "bf16")
    assert parameter_count(config) == 8_030_261_248  # Llama 3.1 8B
    assert parameter_count(config_of(SHAPES["1B"], "bf16")) == 1_235_814_400
    source = RandomSource("int4", CPU)
    layer, head = source.under("layers.0"), source
    layer.matrices({"q_proj": 8, "k_proj": 4}, 256)
    head.matrices({"lm_head": 10}, 64)
    head.matrix("embed_tokens", 10, 64)
    assert source.made.layers == 12 * (128 + 2 * 2)  # codes, and two scales of 128 columns
    assert source.made.head == 10 * (64 + 2)
    assert source.made.tables == 10 * 64 * 2


@pytest.mark.parametrize("form", [INT4, INT8])
def test_generated_weights_keep_activations_in_range(form: str) -> None:
    weight = dequantize(RandomSource("int4", CPU).packed(form, 64, 512), torch.float32)
    assert weight.std() == pytest.approx(512**-0.5, rel=0.15)


def test_a_generated_artefact_is_a_model(tmp_path: Path) -> None:
    size = write(tmp_path / "model", TINY, SETTING)
    assert size == sum(f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors")) - headers(tmp_path)
    assert make_engine(tmp_path / "model", torch.bfloat16).logits([1, 2, 3]).isfinite().all()


def headers(folder: Path) -> int:
    starts = [file.read_bytes()[:8] for file in (folder / "model").glob("*.safetensors")]
    return sum(8 + int.from_bytes(start, "little") for start in starts)


def test_pytest_outcomes_become_rows() -> None:
    report = ElementTree.fromstring(
        '<testsuite><testcase name="good"/><testcase name="bad"><failure message="it is&#10;wrong"/></testcase>'
        '<testcase name="not here"><skipped message="no GPU"/></testcase></testsuite>'
    )
    assert list(report_rows("loop", report)) == [
        {"tests": "loop", "passed": 1, "failed": 1, "skipped": 1},
        {"tests": "  bad", "fault": "it is"},
    ]


def test_verdicts() -> None:
    assert [judged(value, 0.5, 0.7)["verdict"] for value in (0.4, 0.5, 0.7)] == ["below", "accepted", "goal"]
    assert judged(0.9, 0.5)["verdict"] == "accepted"
