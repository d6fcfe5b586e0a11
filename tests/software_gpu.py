"""Run a test's kernels on the GPU made of software (tools/ptx), and report what ran, for docs/kernels.md."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runtime.kernels import harness


@contextmanager
def software_gpu(setting: str, test: str) -> Iterator[None]:
    """setting: a seed, and `,pdl` if each kernel starts before the previous one has ended"""
    from tools.ptx.device import SoftwareGpu  # imports Triton, which must know before whether it interprets

    seed, _, mode = setting.partition(",")
    harness.measured.clear()
    with SoftwareGpu(int(seed), pdl=mode == "pdl") as gpu:
        yield
    if path := os.environ.get("SOFTWARE_GPU_REPORT"):
        launches = [vars(launch) | {"opcodes": sorted(launch.opcodes)} for launch in gpu.launches]
        line = json.dumps({"test": test, "launches": launches, "errors": harness.measured})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
