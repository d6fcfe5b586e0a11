"""What a GPU needs is compiled while a model is loaded, in a process whose kernels are not interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint

ROOT = Path(__file__).parents[2]
QUICK = ("int4",)  # formats of a generated Llama, and families
OTHERS = (
    *("int8", "bf16"),
    *("Llama 3.x", "DeepSeek-V3", "Gemma 2", "Gemma 3", "gpt-oss", "LFM2", "Mixtral", "Qwen3-Next", "Qwen3.5"),
)


@pytest.mark.parametrize("models", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_no_step_waits_for_the_compilation_of_a_kernel(models: tuple[str, ...], tmp_path: Path) -> None:
    """Neither one of sequences that bring any numbers of tokens, nor the first that is captured."""
    for family in FAMILIES.keys() & set(models):
        kind, changes = FAMILIES[family]
        make_checkpoint(tmp_path / family, kind, **changes)
    paths = [str(tmp_path / model) if model in FAMILIES else model for model in models]
    command = [sys.executable, "-m", "tests.runtime.compiled_steps", *paths]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kernels are compiled when it is loaded") == len(models)
