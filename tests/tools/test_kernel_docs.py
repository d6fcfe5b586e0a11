"""GPU kernels compile for other GPUs, in a separate process, as this one interprets them: with the Triton that is
installed, and with each version that `make triton` put into a folder of .triton.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = sorted((ROOT / ".triton").glob("*"))
TIGHT = (
    "decode",
    "latent",
    "prefill",
    "rope_decode",
    "small_m_packed",
)  # modules of kernels with hardly a register to spare
SLOW = pytest.mark.slow
QUICK_ALONE = pytest.mark.part_of_slow
LIMIT_S = 900  # of a compilation of all kernels, on a busy machine
pytestmark = pytest.mark.timeout(LIMIT_S + 10)


@pytest.mark.parametrize("triton", [None, *(pytest.param(folder, marks=SLOW) for folder in VERSIONS)], ids=str)
@pytest.mark.parametrize("modules", [pytest.param(["angles"], marks=QUICK_ALONE), pytest.param([], marks=SLOW)])
def test_every_kernel_compiles_for_every_architecture_without_spilling(
    modules: list[str], triton: Path | None
) -> None:
    """Of all modules, where none is named."""
    check(triton, *modules)


@pytest.mark.slow
@pytest.mark.skipif(not VERSIONS, reason="takes many minutes: run `make triton` first")
@pytest.mark.parametrize("triton", [None, *VERSIONS], ids=str)
@pytest.mark.parametrize("module", TIGHT)
def test_no_example_of_a_tight_kernel_spills(module: str, triton: Path | None) -> None:
    check(triton, "--every", module)


def check(triton: Path | None, *arguments: str) -> None:
    command = [sys.executable, "tools/kernel_docs.py", "--check", *arguments]
    command += ["--triton", str(triton)] if triton else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples fit on 5 architectures" in done.stdout
    if triton:  # a folder is named after the version that it holds
        assert f"compiled by Triton {triton.name}" in done.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_amd() -> None:
    command = [sys.executable, "tools/kernel_docs.py", "--amd", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples fit on 3 architectures" in done.stdout
