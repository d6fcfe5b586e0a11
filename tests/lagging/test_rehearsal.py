"""The tests that run on a GPU, if there is one, run on a lagging device: so that no time of a GPU is lost to
tensors that they leave on the host, kernels that only a CPU has, and modes of torch that are in the way.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {
    "kernels": ["tests/runtime/kernels/gpu"],
    "families": ["tests/gpu/test_families.py", "-k", "gpt-oss"],
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tests", TESTS.values(), ids=TESTS)
def test_tests_for_a_gpu_pass_on_a_lagging_device(tests: list[str]) -> None:
    options = ["-q", "--tb=short", "-o", "addopts=", "-m", "not slow", "-W", "default", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=os.environ | {"LAGGING_GPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
