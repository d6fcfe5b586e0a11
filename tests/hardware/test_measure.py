import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import localllm
from localllm.hardware import measure as rates
from localllm.hardware.device import device_name, free_bytes
from localllm.hardware.measure import RateSetup, measure, measure_this_machine, median_seconds
from localllm.settings import Settings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MIN_CPU_SHARE", 0.0)
    monkeypatch.setattr(rates, "COLUMNS", 64)
    monkeypatch.setattr(rates, "MATRIX_ROWS", {"cpu": 32})
    monkeypatch.setattr(rates, "BUFFER_BYTES", {"cpu": 10 * 32 * 64 * 4})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", device="cpu", dtype="float32", threads=1)


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations read or write, except vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.count += sum(t.nbytes for t in tensors if t.numel() > rates.COLUMNS)
        return func(*args, **(kwargs or {}))


def test_rates_are_bytes_and_operations_over_time() -> None:
    runs: list[rates.Workload] = []

    def clock(run: rates.Workload) -> float:
        runs.append(run)
        return 0.5

    measured = measure(CPU, torch.float32, clock)
    copy, read, multiply = dict.fromkeys(runs)
    for run, rate in [(copy, measured.copy), (read, measured.read)]:
        with TensorBytes() as moved:
            run()
        assert rate == moved.count / 0.5 == 10 * 32 * 64 * 4 / 0.5
    with FlopCounterMode(display=False) as counter:
        multiply()
    assert measured.flops == counter.get_total_flops() / 0.5 > 0


def test_times_are_medians_without_the_first_run() -> None:
    taken = iter([9.0, 0.01, 0.03, 0.01, 0.02, 0.02])
    assert median_seconds(lambda run: next(taken), lambda: None) == 0.02
    assert next(taken, None) is None


def test_a_slow_machine_repeats_less() -> None:
    taken = iter([9.0, 8.0, 7.0])
    assert median_seconds(lambda run: next(taken), lambda: None) == 8.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_rates_are_positive_numbers(dtype: torch.dtype) -> None:
    measured = measure(CPU, dtype)
    assert all(0 < rate < math.inf for rate in vars(measured).values())


def test_little_memory_makes_a_smaller_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "free_bytes", lambda device: 100)
    assert measure(CPU, torch.float32, lambda run: 1.0).read == 32 * 64 * 4


def test_this_machine_is_measured_once(settings: Settings) -> None:
    first = measure_this_machine(settings=settings)
    assert (first.name, first.device_type, first.measured) == (device_name(CPU), "cpu", True)
    assert 0 < first.memory_bytes <= 2 * free_bytes(CPU)
    again = measure_this_machine("cpu", "float32", settings)
    assert (again.bandwidth, again.flops) == (first.bandwidth, first.flops)


def edit(settings: Settings, **setup: object) -> None:
    """Set the single stored entry to recognizable rates, and optionally another setup."""
    file = settings.home / "rates.json"
    kept = json.loads(file.read_text())
    [entry] = kept["kept"]
    entry["rates"] |= {"copy": 1.0, "read": 2.0, "flops": 3.0}
    entry["setup"] |= setup
    file.write_text(json.dumps(kept))


def test_saved_rates_are_used(settings: Settings) -> None:
    measure_this_machine(settings=settings)
    edit(settings)
    kept = measure_this_machine(settings=settings)
    assert (kept.bandwidth, kept.flops) == (2.0, 3.0)
    assert measure_this_machine(settings=settings, remeasure=True).bandwidth != 2.0
    assert measure_this_machine(settings=settings).bandwidth != 2.0


@pytest.mark.parametrize(
    "other",
    [{"device": "another"}, {"dtype": "float16"}, {"cores": 9999}, {"threads": 2}, {"torch": "1.0"}],
    ids=lambda other: next(iter(other)),
)
def test_rates_of_another_setup_are_not_used(settings: Settings, other: dict[str, object]) -> None:
    measure_this_machine(settings=settings)
    edit(settings, **other)
    assert measure_this_machine(settings=settings).bandwidth != 2.0
    kept = json.loads((settings.home / "rates.json").read_text())["kept"]
    assert len(kept) == 2  # the other's stay for when it comes back
    assert kept[0]["rates"]["read"] == 2.0


def test_threads_of_the_settings_are_used_and_given_back(settings: Settings, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    measure_this_machine(settings=Settings(tmp_path, "cpu", "float32", threads=before + 1))
    assert torch.get_num_threads() == before
    [entry] = json.loads((tmp_path / "rates.json").read_text())["kept"]
    assert entry["setup"]["threads"] == before + 1


def test_rates_of_a_busy_machine_are_not_saved(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_this_machine(settings=settings)
    edit(settings)
    monkeypatch.setattr(rates, "MIN_CPU_SHARE", 2.0)
    notes: list[str] = []
    assert measure_this_machine(settings=settings, remeasure=True, note=notes.append).bandwidth != 2.0
    assert len(notes) == 1 and "not saved" in notes[0]
    assert measure_this_machine(settings=settings).bandwidth == 2.0  # of a quiet hour


def test_rates_with_little_memory_are_not_saved(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "free_bytes", lambda device: 8 * 4 * 32 * 64 * 4)  # for 4 of 10 matrices
    notes: list[str] = []
    assert measure_this_machine(settings=settings, note=notes.append).bandwidth > 0
    assert len(notes) == 1 and "not saved" in notes[0]
    assert not (settings.home / "rates.json").exists()


@pytest.mark.slow
def test_other_load_lowers_the_cpu_share() -> None:
    """Measures on the only core, next to an endless loop."""
    code = (
        "import os, subprocess, sys, torch; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from localllm.hardware.measure import measure\n"
        "torch.set_num_threads(1)\n"
        "with subprocess.Popen([sys.executable, '-c', 'while True: pass']) as loop:\n"
        "    print(measure(torch.device('cpu'), torch.float32).share)\n"
        "    loop.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert 0 < float(done.stdout) < 0.8, done.stderr


def spoil(change: Callable[[dict], object]) -> bytes:
    setup = vars(RateSetup("a", "b", 1, 1, "c"))
    content = {"kept": [{"setup": setup, "rates": {"copy": 1.0, "read": 2.0, "flops": 3.0, "share": 1.0}}]}
    change(content)
    return json.dumps(content).encode()


DAMAGED = {
    "empty": b"",
    "cut": b'{"kept": [{"setup',
    "no object": b"[]",
    "no list": b'{"kept": 3}',
    "no entries": b'{"kept": ["a", 3, null]}',
    "list of rates": spoil(lambda c: c["kept"][0].update(rates=[1.0])),
    "rate missing": spoil(lambda c: c["kept"][0]["rates"].pop("read")),
    "rate of text": spoil(lambda c: c["kept"][0]["rates"].update(read="fast")),
    "rate of 0": spoil(lambda c: c["kept"][0]["rates"].update(read=0.0)),
    "infinite rate": spoil(lambda c: c["kept"][0]["rates"].update(read=math.inf)),
    "rate unknown": spoil(lambda c: c["kept"][0]["rates"].update(write=1.0)),
    "unhashable setup": spoil(lambda c: c["kept"][0]["setup"].update(device=[])),
    "setup unknown": spoil(lambda c: c["kept"][0]["setup"].update(colour="red")),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_measured_over_with_a_note(settings: Settings, content: bytes) -> None:
    settings.home.mkdir()
    (settings.home / "rates.json").write_bytes(content)
    notes: list[str] = []
    measured = measure_this_machine(settings=settings, note=notes.append)
    assert [note.count("rates.json") for note in notes] == [1]
    assert measure_this_machine(settings=settings, note=notes.append).bandwidth == measured.bandwidth
    assert len(notes) == 1


@pytest.mark.parametrize("block", ["home", "file"])
def test_rates_that_cannot_be_saved_are_measured_each_time(settings: Settings, block: str) -> None:
    if block == "home":
        settings.home.write_text("in the way")
    else:
        (settings.home / "rates.json").mkdir(parents=True)
    notes: list[str] = []
    assert measure_this_machine(settings=settings, note=notes.append).bandwidth > 0
    assert len(notes) == 1 and "not be saved" in notes[0]


def test_the_file_does_not_grow_for_ever(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_SETUPS", 2)
    for threads in (1, 2, 3):
        measure_this_machine(settings=Settings(settings.home, "cpu", "float32", threads))
    kept = json.loads((settings.home / "rates.json").read_text())["kept"]
    assert [entry["setup"]["threads"] for entry in kept] == [2, 3]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_loaded_model_measures_its_bandwidth_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(rates, "MIN_CPU_SHARE", 1e9 if is_busy else 0.0)
    with localllm.load("demo", settings=settings) as llm:
        assert llm.reads.bandwidth is None
        llm.measure_rates()
        bandwidth = llm.reads.bandwidth
        assert (bandwidth is None) == is_busy == (not (settings.home / "rates.json").exists())
        monkeypatch.setattr(rates, "measure", lambda *arguments: pytest.fail("measured again"))
        if not is_busy:
            llm.measure_rates()
            assert bandwidth and bandwidth > 0 and llm.reads.bandwidth == bandwidth


def test_a_loaded_model_measures_nothing_where_little_memory_is_free(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with localllm.load("demo", settings=settings) as llm:
        monkeypatch.setattr(rates, "free_bytes", lambda device: 1000)
        llm.measure_rates()
        assert llm.reads.bandwidth is None
