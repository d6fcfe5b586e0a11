"""The harness of bench/gpu.sh with tiny shapes on a CPU; its numbers mean nothing."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as driver
from bench.gpu import correct, setting
from bench.gpu.artefact import write
from bench.gpu.correct import outcomes, rows_of_groups
from bench.gpu.part import rows_of
from bench.gpu.results import Results, table
from bench.gpu.setting import WHEELS, Setting, judged
from localllm.arch.cost import parameter_count
from localllm.benchmark.gpu.decode_steps import WrongDrafts
from localllm.benchmark.gpu.generated import SHAPES, TINY, RandomSource, config_of
from localllm.quant.dequantize import dequantize
from localllm.quant.packing import INT4, INT8
from localllm.runtime.kernels.gpu import launch
from tests.runtime.test_engine import sequence
from tests.tiny import CPU, make_engine

SETTING = Setting(CPU, tiny=True)
MINUTES = 12 * 60
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


def test_all_parts_fit_into_twelve_minutes() -> None:
    """But for the compilation of their kernels, which comes first."""
    assert driver.PARTS[0] == "compile"
    assert sum(map(driver.budget_s, driver.PARTS[1:])) < MINUTES


def test_kernels_are_compiled_before_the_parts_that_launch_them() -> None:
    assert driver.with_kernels(["ceilings"]) == ["ceilings"]
    assert driver.with_kernels(["kernels", "roofline"]) == ["compile", "kernels", "roofline"]
    assert driver.with_kernels(driver.PARTS) == list(driver.PARTS)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_what_was_compiled_before_is_not_compiled_again(tmp_path: Path) -> None:
    """In processes whose kernels are not interpreted: the first compiles for a GPU that is not here, the second
    finds everything in the cache of Triton's own launcher."""
    code = (
        "from bench.gpu.compile import record_steps\n"
        "from localllm.benchmark.gpu.generated import TINY\n"
        "from localllm.runtime.kernels.gpu import register\n"
        "from localllm.runtime.kernels.gpu.launch import GPUS\n"
        "from tools.triton_aot import compile_all\n"
        "launches = record_steps(TINY, 'int4', GPUS[90])\n"
        "small = ('norm_kernel', 'rope_angles_kernel', 'begin_step_kernel', 'end_step_kernel')\n"
        "launches = [launch for launch in launches if launch.kernel.__name__ in small]\n"
        "compile_all(launches, GPUS[90], 2)\n"
        "print(len(launches), {launch.arguments['PDL'] for launch in launches})\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    found: list[set[Path]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
        assert re.match(r"\d\d \{(True, False|False, True)\}", done.stdout)
        found.append(set(tmp_path.rglob("*.cubin")))
    assert len(found[0]) >= 10 and found[1] == found[0]


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own_and_its_rows_are_kept(tmp_path: Path) -> None:
    results = Results(tmp_path, CPU)
    assert driver.run("ceilings", "cpu", True, results) is None
    [file] = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["torch"] == torch.__version__ and found["date"] in file.name
    assert len(found["parts"]["ceilings"]["rows"]) == 3 and found["parts"]["ceilings"]["problem"] is None
    assert "## ceilings" in file.with_suffix(".md").read_text()


def test_a_part_runs_on_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events and streams, too: as on a machine with two GPUs."""
    current = [0]

    @contextmanager
    def device(named: torch.device) -> Iterator[None]:
        current.append(named.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    ceilings = import_module("bench.gpu.ceilings")
    monkeypatch.setattr(ceilings, "measure", lambda setting: iter([{"current": current[-1]} for _ in range(2)]))
    assert list(rows_of("ceilings", Setting(torch.device("cuda", 1)))) == [{"current": 1}, {"current": 1}]
    assert current == [0]


def test_the_step_is_measured_with_and_without_early_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of sm_90 or newer, which is not here."""
    roofline = import_module("bench.gpu.roofline")
    monkeypatch.setattr(roofline, "uses_pdl", lambda device: not launch._without_pdl.get())
    monkeypatch.setattr(roofline, "CASES", (("8B", "int4"),))
    rows = [row for row in roofline.measure(SETTING) if "PDL" in row]
    assert [row["PDL"] for row in rows] == ["on", "on", "off"]
    assert rows[0]["context"] == rows[2]["context"]
    assert not launch._without_pdl.get()


@pytest.mark.parametrize("part", [part for part in driver.PARTS if part in WHEELS])
def test_a_part_without_its_wheels_is_left_out_and_names_them(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "find_spec", lambda name: None)
    [row] = rows_of(part, SETTING)
    assert str(row["left out"]).endswith(f"pip install {' '.join(WHEELS[part])}")
    assert all(wheel in Path("bench/gpu.sh").read_text() for wheel in WHEELS[part])


def bare_site(folder: Path, *wheels: str) -> Path:
    """A site folder that holds these wheels, and what they require, alone."""
    folder.mkdir()
    waiting, seen = list(wheels), set[str]()
    while waiting:
        if (name := waiting.pop().lower().replace("_", "-")) in seen:
            continue
        seen.add(name)
        try:
            wheel = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system, or another version of Python
            continue
        for top in {file.parts[0] for file in wheel.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(wheel.locate_file(top))))
        needs = (need for need in wheel.requires or () if "extra ==" not in need)
        waiting += [found[0] for need in needs if (found := re.match(r"[\w.-]+", need))]
    return folder


BARE = ("torch", "triton", "numpy", "safetensors", "psutil", "llvmlite", "pytest")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_tests_for_gpus_are_collected_on_a_bare_machine(tmp_path: Path) -> None:
    """As on one that has a GPU, and of wheels only those that the first lines of bench/gpu.sh name."""
    code = (
        "import sys\n"
        f"sys.path[:0] = ['.', {str(bare_site(tmp_path / 'site', *BARE))!r}]\n"
        "import torch, pytest\n"
        "torch.cuda.is_available = lambda: True\n"
        "options = ['-q', '-p', 'no:cacheprovider', '-o', 'addopts=', '--collect-only']\n"
        "sys.exit(pytest.main([*options, 'tests/gpu', 'tests/runtime/kernels/gpu']))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\d{3} tests collected", done.stdout) and "test_family" in done.stdout


def test_a_part_is_stopped_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "budget_s", lambda part: 0.3)
    results = Results(tmp_path, CPU)
    assert driver.run("roofline", "cpu", True, results) == "stopped: it had 0.3 s"
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


def test_drafts_of_a_model_that_repeats_itself_are_wrong() -> None:
    repeating = [sequence([3, 7, 7], max_tokens=9), sequence([5, 9, 9], max_tokens=2)]
    WrongDrafts(4, vocab_size=10).draft(repeating)
    assert [each.draft_ids for each in repeating] == [[8] * 4, [0]]


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


@pytest.mark.parametrize(("gigabytes", "processes"), [(4, 1), (15, 2), (23, 3), (31, 5), (79, 13), (140, 16)])
def test_processes_of_tests_fit_into_the_memory_of_the_gpu(
    gigabytes: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gigabytes * 2**30, gigabytes * 2**30))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert correct.worker_count(Setting(torch.device("cuda", 0))) == processes


def test_what_torch_caches_of_a_model_before_is_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [2**30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(20 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 24 * 2**30))
    assert Setting(torch.device("cuda", 0)).room_for(16 * 2**30)


@pytest.mark.slow
def test_outcomes_of_tests_become_rows_as_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(correct.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    Path("test_of_a_gpu.py").write_text(
        """import pathlib, time, pytest
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): raise ValueError("it is\\nwrong")
def test_left_out(): pytest.skip("no GPU")
def test_good():
    while not pathlib.Path("go on").exists(): time.sleep(0.05)
"""
    )
    groups = {"loop": "test_of_a_gpu.py"}
    rows = rows_of_groups(groups, outcomes(["test_of_a_gpu.py"], 1, time.monotonic() + 300))
    assert next(rows) == {"tests": "  test_bad[1]", "fault": "ValueError: it is"}
    Path("go on").touch()
    assert list(rows) == [{"tests": "loop", "passed": 1, "failed": 2, "skipped": 1}]
    Path("go on").unlink()
    [row] = rows_of_groups(groups, outcomes(["test_of_a_gpu.py::test_good"], 1, time.monotonic() + 0.5))
    assert row["fault"] == f"stopped: all tests have {correct.STOPPED_AFTER_S} s"
    [row] = rows_of_groups(groups, outcomes(["missing.py"], 1, time.monotonic() + 300))
    assert row["fault"] == "pytest ended with 4"


@pytest.mark.slow
def test_a_worker_whose_gpu_has_faulted_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(correct.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    Path("test_of_a_gpu.py").write_text(
        """import pytest, torch
faulty = False
def synchronize():
    if faulty: raise torch.AcceleratorError("CUDA error: misaligned address")
torch.cuda.is_available, torch.cuda.synchronize = lambda: True, synchronize
@pytest.mark.parametrize("n", range(8))
def test_kernel(n):
    global faulty
    if n == 2: faulty = True
    synchronize()
"""
    )
    rows = rows_of_groups({"kernels": "test_of"}, outcomes(["test_of_a_gpu.py"], 2, time.monotonic() + 300))
    assert next(rows)["tests"] == "  test_kernel[2]"
    assert list(rows) == [{"tests": "kernels", "passed": 7, "failed": 1, "skipped": 0}]


def test_verdicts() -> None:
    assert [judged(value, 0.5, 0.7)["verdict"] for value in (0.4, 0.5, 0.7)] == ["below", "accepted", "goal"]
    assert judged(0.9, 0.5)["verdict"] == "accepted"
