"""All Triton kernels run on a GPU made of software, in a process of their own, as this one interprets them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.software_gpu import ENGINE, PAGE, PLANTED

ROOT = Path(__file__).parents[2]


def software_gpu(*arguments: str) -> set[str]:
    """Run tools/software_gpu.py; return the names of the kernels that ran. Its output has the seed."""
    command = [sys.executable, "tools/software_gpu.py", "--check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    return set(done.stdout.rpartition("kernels: ")[2].split())


def documented_kernels() -> set[str]:
    """Return the names of all kernels with examples."""
    page = PAGE.read_text(encoding="utf-8").partition("<!-- kernels -->")[2].partition("<!-- end -->")[0]
    return set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))


@pytest.mark.timeout(900)  # 30 s of CPU time
def test_each_kernel_once() -> None:
    assert documented_kernels() <= software_gpu("--quick")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_kernel() -> None:
    """With another seed than the table of docs/kernels.md, and starting before the previous kernel has ended."""
    assert documented_kernels() <= software_gpu("--seed", "3", "--pdl")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", [PLANTED, ENGINE], ids=["faults planted in kernels", "the engine"])
def test_more(tests: str) -> None:
    software_gpu(tests)
