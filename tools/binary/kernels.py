"""Compiled kernels of the bundled model, for the levels of processors that this one reaches.

They are what the program itself leaves in its cache, so that an answer on such a processor compiles none.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from localllm.hardware import processor
from localllm.runtime.kernels.cpu.compile import SHIPPED_KERNELS
from tools.binary.collect import PACKAGES

LEVELS = ("avx512", "avxvnni", "avx2")
DTYPES = ("float32", "bfloat16")  # that processors compute in, by their instructions
QUESTION = ("run", "demo", "Tell me a story", "--local", "--max-tokens", "4")


def add_kernels(tree: Path, program: PurePosixPath, arguments: Sequence[str]) -> None:
    """Run the program of the tree for each level and dtype, and copy what it has compiled into the tree."""
    target = tree / PACKAGES / "localllm" / SHIPPED_KERNELS
    target.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        if not processor.reaches_level(processor.host_features(), level):
            print(f"no kernels for {level}: this processor has not its instructions")
            continue
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as cache:
                environment = {"HOME": cache, "LOCALLLM_CPU": level, "PYTHONNOUSERSITE": "1", "PATH": os.defpath}
                command = [tree / program, *arguments, *QUESTION, "--dtype", dtype]
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                for kernel in Path(cache).glob(".cache/localllm/kernels/*.o"):
                    shutil.copyfile(kernel, target / kernel.name)
    print(f"{len(list(target.iterdir()))} kernels")
