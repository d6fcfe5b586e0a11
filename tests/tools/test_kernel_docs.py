"""GPU kernels compile for other GPUs, in a separate process, as this one interprets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("modules", [["norms"], pytest.param([], marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_every_architecture_without_spilling(modules: list[str]) -> None:
    """Of all modules, where none is named."""
    command = [sys.executable, "tools/kernel_docs.py", "--check", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples fit on 5 architectures" in done.stdout


@pytest.mark.parametrize("modules", [["small_m_packed"], pytest.param([], marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_amd(modules: list[str]) -> None:
    command = [sys.executable, "tools/kernel_docs.py", "--amd", "--check", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples fit on 3 architectures" in done.stdout
