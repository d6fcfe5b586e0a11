"""A machine on which Triton cannot build the code that launches kernels runs without it, and says why."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from localllm.hardware.triton_support import triton_fault
from localllm.runtime import kernels

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
COMPILER = """#!/bin/sh
echo 'stdin:1:10: fatal error: stdlib.h: No such file or directory' >&2
exit 1
"""


@pytest.fixture(autouse=True)
def examined_again() -> Iterator[None]:
    triton_fault.cache_clear()
    yield
    triton_fault.cache_clear()


def test_a_complete_machine_has_no_fault() -> None:
    assert triton_fault() is None


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    fault, remedy = triton_fault() or ("", "")
    assert "there is no C compiler" in fault and "install gcc or clang" in remedy


def test_a_compiler_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    fault, _ = triton_fault() or ("", "")
    assert f"{tmp_path / 'cc'} does not run" in fault


def test_missing_headers_of_python_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    fault, remedy = triton_fault() or ("", "")
    assert f"Python.h is missing in {tmp_path}" in fault and "python3-dev" in remedy


def test_missing_headers_of_the_c_library_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    fault, remedy = triton_fault() or ("", "")
    assert "stdlib.h: No such file" in fault and "libc6-dev" in remedy


def test_the_engine_gives_the_reason_why_it_runs_without_triton(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "triton_loaded", False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = kernels.triton_unsupported(torch.device("cuda", 0)) or ""
    assert reason.startswith("torch computes without Triton, because there is no C compiler")
    assert "install gcc" in reason


def test_without_a_compiler_no_kernel_of_triton_is_registered(tmp_path: Path) -> None:
    """As on a machine with a GPU, in a process of its own."""
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "from localllm.runtime import kernels\n"
        "from localllm.runtime.kernels.registry import KERNELS\n"
        "assert not kernels.triton_loaded and 'triton' not in sys.modules\n"
        "assert not any(k.name.startswith('triton') for each in KERNELS.values() for k in each)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
