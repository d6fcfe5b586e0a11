"""The doctor's page, remedies and exit codes for simulated machines."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from localllm.benchmark.gpu import self_test
from localllm.benchmark.gpu.self_test_report import CheckedModel, ProductRate, SelfTest, StepRate
from localllm.cli import doctor as module
from localllm.cli.doctor import (
    BundledModel,
    Examination,
    HomeFolder,
    Measurement,
    Nvidia,
    Processor,
    Terminal,
    diagnose,
)
from localllm.hardware import device
from localllm.hardware.device import Gpu
from localllm.hardware.measure import Rates
from localllm.hub.hf_cache import CacheState
from localllm.hub.http import HubAccess
from localllm.plan import runs

RATES = Rates(copy=1e12, read=1e12, flops=1e14, share=1.0)
GPU = Gpu(0, "RTX 4090", "sm_89", "8.9", runs=True, memory_bytes=25_000_000_000, free_bytes=24_000_000_000)
FINE = Examination(
    versions={"torch": "2.13.0", "triton": "3.6.0"},
    torch_fault=None,
    triton_fault=None,
    triton_remedy=None,
    processor=Processor("a CPU", 8, 8, 8, ["AVX512"], "AVX-512 VNNI", 64_000_000_000, 60_000_000_000, None),
    gpus=[GPU],
    nvidia=Nvidia(plugged_in=1, driver="575.57", torch_cuda="12.8", hidden=False, fault=None),
    measured=[
        Measurement("cpu", "bfloat16", RATES, 20e9, None),
        Measurement("cuda:0", "bfloat16", RATES, None, None),
    ],
    boxed=BundledModel("cuda:0", "bfloat16", 32, 500.0),
    cache=CacheState(Path("/cache"), "default", True, True, 3, 9_000_000_000, 0, 0, 500_000_000_000),
    home=HomeFolder(Path("/home/me/.localllm"), "default", writable=True),
    hub=HubAccess("https://huggingface.co", offline=False, token=None, proxies={}),
    terminal=Terminal(here=True, type="xterm-256color", encoding="utf-8"),
)


def but(**changes: Any) -> Examination:
    """Return FINE with changes; `cache__writable=False` changes a nested field."""
    seen = FINE
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        value = dataclasses.replace(getattr(seen, outer), **{inner: value}) if inner else value
        seen = dataclasses.replace(seen, **{outer: value})
    return seen


def test_a_machine_with_everything_has_no_findings() -> None:
    assert diagnose(FINE) == []
    assert (
        diagnose(but(gpus=[], nvidia=Nvidia(0, None, None, hidden=False, fault=None), versions={"triton": None}))
        == []
    )


NO_GPU_SEEN = {"gpus": [], "versions": {"triton": None}}


@pytest.mark.parametrize(
    ("seen", "what", "remedy"),
    [
        (but(**NO_GPU_SEEN, nvidia__torch_cuda=None), "this torch build is CPU-only", "install one with CUDA"),
        (but(**NO_GPU_SEEN, nvidia__hidden=True), "CUDA_VISIBLE_DEVICES hides it", "unset"),
        (but(**NO_GPU_SEEN, nvidia__driver=None), "no driver is loaded", "install NVIDIA's driver"),
        (but(**NO_GPU_SEEN), "torch for CUDA 12.8 cannot use it with driver 575.57", "update the driver"),
        (but(**NO_GPU_SEEN, nvidia__plugged_in=0), "cannot use it with driver", "update the driver"),
        (
            but(triton_fault="it is not installed", triton_remedy="run `pip install triton`"),
            "run without Triton, which compiles their kernels: it is not installed",
            "pip install triton",
        ),
        (
            but(measured=[Measurement("cuda:0", "bfloat16", None, None, "out of memory")]),
            "out of memory",
            "free some of its memory",
        ),
        (
            but(measured=[Measurement("cpu", "bfloat16", dataclasses.replace(RATES, share=0.5), 20e9, None)]),
            "other programs used 50% of the cores",
            "again when they are idle",
        ),
        (but(cache__writable=False), "/cache is not writable", "HF_HUB_CACHE"),
        (but(cache__free_bytes=3_000_000_000), "3.00 GB of disk are free for models", "HF_HUB_CACHE"),
        (
            but(cache__unfinished=1, cache__unfinished_bytes=5_000),
            "1 download is incomplete (5.00 kB)",
            "pull NAME",
        ),
        (but(cache__unfinished=2), "2 downloads are incomplete", "pull NAME"),
        (but(home__writable=False), "/home/me/.localllm is not writable", "LOCALLLM_HOME"),
        (but(terminal__type="dumb"), "TERM is dumb", "TERM"),
        (but(terminal__type=""), "TERM is not set", "TERM"),
        (but(terminal__encoding="ascii"), "the encoding of the locale is ascii", "LANG"),
        (
            but(gpus=[dataclasses.replace(GPU, name="Tesla T4", arch="sm_75")]),
            "the Tesla T4 is sm_75: kernels need sm_80",
            "use the CPU",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_warnings_are_no_failures(seen: Examination, what: str, remedy: str) -> None:
    [finding] = diagnose(seen)
    assert what in finding.what and remedy in finding.remedy
    assert not finding.breaks_run


@pytest.mark.parametrize(
    ("seen", "what", "remedy"),
    [
        (
            but(torch_fault="ImportError: libcudart", gpus=[], measured=[]),
            "ImportError: libcudart",
            "reinstall it",
        ),
        (
            but(gpus=[], nvidia__fault="RuntimeError: busy"),
            "a GPU does not respond",
            "--device cpu",
        ),
        (but(gpus=[dataclasses.replace(GPU, runs=False)]), "has no kernels for the RTX", "--device cpu"),
        (
            but(boxed=BundledModel(fault="RuntimeError: no")),
            "does not run (RuntimeError: no)",
            "reinstall localllm",
        ),
        (but(boxed=BundledModel(fault="no device", remedy="name cpu")), "does not run (no device)", "name cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_problem_that_blocks_run_is_a_failure(seen: Examination, what: str, remedy: str) -> None:
    [finding] = diagnose(seen)
    assert what in finding.what and remedy in finding.remedy
    assert finding.breaks_run


def test_a_missing_terminal_is_no_problem_without_one() -> None:
    assert diagnose(but(terminal=Terminal(here=False, type="", encoding="ascii"))) == []


def test_failures_are_listed_first() -> None:
    found = diagnose(but(home__writable=False, boxed=BundledModel(fault="no")))
    assert [finding.breaks_run for finding in found] == [True, False]


@pytest.fixture
def doctor(monkeypatch, real):
    """Run the doctor on a simulated machine; return exit code, stdout and stderr."""

    def run(seen: Examination, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(module, "examine_machine", lambda settings: seen)
        return real("doctor", *flags)

    return run


NO_CUDA = {"GPU": "none that torch can use", "driver": "575.57, torch is built for CUDA -"}
AMD = "MI300X, 25.0 GB, 24.0 GB free, gfx942, kernels compile for it and were never measured on AMD"
NO_TORCH = {"processor__threads": None, "processor__instructions": None, "processor__kernels": None}


@pytest.mark.parametrize(
    ("seen", "rows"),
    [
        (FINE, {"torch": "2.13.0", "cores": "8", "kernels use": "AVX-512 VNNI"}),
        (FINE, {"cuda:0": "RTX 4090, 25.0 GB, 24.0 GB free, sm_89", "memory": "64.0 GB, 60.0 GB free"}),
        (FINE, {"driver": "575.57, torch is built for CUDA 12.8", "cuda:0 matmul": "100 TFLOP/s"}),
        (FINE, {"cuda:0 copy": "1.00 TB/s, reads and writes", "cuda:0 read": "1.00 TB/s of weights in bfloat16"}),
        (FINE, {"cpu read INT4": "20.0 GB/s of weights, 2% of memory bandwidth"}),
        (FINE, {"bundled model": "500 tokens/s on cuda:0 in bfloat16", "models": "3, 9.00 GB"}),
        (FINE, {"cache": "/cache (default)", "incomplete": "none", "free disk": "500 GB"}),
        (FINE, {"token": "none; gated models need one", "offline": "no", "proxies": "none"}),
        (but(versions={"triton": None}), {"triton": "not installed"}),
        (but(processor__cores=2.5, processor__threads=1), {"cores": "2.5 of 8", "torch uses": "AVX512, 1 thread"}),
        (but(processor__container_bytes=4_000_000_000), {"container": "limited to 4.00 GB"}),
        (but(**NO_TORCH), {"torch uses": "-", "kernels use": "-"}),
        (but(gpus=[], nvidia__torch_cuda=None), NO_CUDA),
        (but(gpus=[dataclasses.replace(GPU, index=1, name="MI300X", arch="gfx942")]), {"cuda:1": AMD}),
        (but(boxed=BundledModel(fault="no")), {"bundled model": "does not run"}),
        (but(boxed=BundledModel("cpu", "float32", 1)), {"bundled model": "- on cpu in float32"}),
        (
            but(cache=CacheState(Path("/c"), "HF_HOME", False, False, 0, 0, 2, 5_000, 10**12)),
            {"cache": "/c (HF_HOME, does not exist yet, not writable)", "incomplete": "2, 5.00 kB"},
        ),
        (but(home__writable=False), {"home": "/home/me/.localllm (default, not writable)"}),
        (
            but(hub=HubAccess("https://hub", True, "HF_TOKEN", {"http": "a", "https": "b"})),
            {"token": "from HF_TOKEN", "offline": "yes, HF_HUB_OFFLINE is set", "proxies": "http: a  https: b"},
        ),
    ],
)
def test_rows_of_the_page(doctor, seen: Examination, rows: dict[str, str]) -> None:
    _, out, err = doctor(seen)
    printed = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert err == "" and printed | rows == printed


def test_the_exit_code_and_last_lines_say_what_is_broken(doctor) -> None:
    code, out, _ = doctor(FINE)
    assert code == 0 and out.endswith("\n\nNo problems found.\n")
    sick = but(home__writable=False, nvidia__fault="RuntimeError: busy")
    code, out, _ = doctor(sick)
    broken, noted = out.split("\n\n")[-1].splitlines()
    assert code == 1 and broken.startswith("broken: a GPU does not respond (RuntimeError: busy); run `nvidia-smi`")
    assert noted.startswith("note: /home/me/.localllm is not writable")
    code, out, err = doctor(sick, "--json")
    found = json.loads(out)
    assert (code, err, found["fine"]) == (1, "", False)
    assert [finding["breaks_run"] for finding in found["findings"]] == [True, False]
    assert found["home"]["path"] == "/home/me/.localllm" and found["gpus"][0]["arch"] == "sm_89"


def test_errors_of_devices_and_of_the_bundled_model_are_findings(real, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    for name in ("list_gpus", "device_rates", "load_model"):
        monkeypatch.setattr(module, name, fail)
    code, out, _ = real("doctor")
    assert code == 1 and "TORCH_USE_CUDA_DSA" not in out
    assert "broken: a GPU does not respond (RuntimeError: CUDA error: out of memory); " in out
    assert "broken: the bundled model does not run (RuntimeError: CUDA error: out of memory); reinstall" in out
    assert "note: cpu could not be measured (CUDA error: out of memory); free some of its memory" in out


TESTED = SelfTest(
    *("RTX 4090", 1e12, 1.6e14),
    checked=[CheckedModel("llama", {"linear/int4": 7}, []), CheckedModel("mamba", {"scan/x": 2}, ["off by 3"])],
    products=[ProductRate("int4", 1, 9e11, 0.9)],
    steps=[StepRate("8B", "int4", 512, 150.0, 8e11, 0.8, 1e14, "")],
    left_out=["int8 products, out of memory"],
    seconds=61.0,
)


@pytest.mark.parametrize(("setting", "gpu"), [("auto", "cuda:0"), ("cpu", "cuda:0"), ("cuda:1", "cuda:1")])
def test_the_self_test_of_a_gpu_is_shown_and_kept_for_plans(doctor, monkeypatch, tmp_path, setting, gpu) -> None:
    tested = []
    monkeypatch.setattr(device, "gpu_fault", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(self_test, "run_self_test", lambda place: tested.append(str(place)) or TESTED)
    monkeypatch.setenv("LOCALLLM_DEVICE", setting)
    code, out, err = doctor(FINE, "--gpu-selftest")
    assert (code, err, tested) == (1, "", [gpu])
    [rows] = [block.splitlines()[1:] for block in out.split("\n\n") if block.startswith("SELF-TEST")]
    assert "|".join(row.split("  ")[0] for row in rows) == "llama|mamba|copy|products in int4|8B in int4|duration"
    assert "broken: a kernel is wrong on the RTX 4090 (mamba: off by 3); use --device cpu" in out
    assert "note: the self-test left out int8 products, out of memory; run it again" in out
    [kept] = runs.read(tmp_path / "home" / runs.SELF_TEST_FILE, pytest.fail)
    assert (kept.model, kept.form, kept.tokens_per_s) == ("8B model", "INT4", 150.0)
