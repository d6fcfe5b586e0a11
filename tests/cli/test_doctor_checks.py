"""The doctor's remedies for simulated machines."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

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
from localllm.hardware.device import Gpu
from localllm.hardware.measure import Rates
from localllm.hub.hf_cache import CacheState
from localllm.hub.http import HubAccess

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
