"""Load the kernels for GPUs as functions of Triton's interpreter, which the fixture `interpreter` enables in a
test. With a GPU they are compiled for it; without Triton, as on macOS and Arm, there are none.

With a seed in the environment variable SOFTWARE_GPU, they are compiled to PTX instead, which tools/ptx executes
(tests/software_gpu.py)."""

import importlib.util
import inspect
import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch

ON_GPU = torch.cuda.is_available()
SOFTWARE_GPU = os.environ.get("SOFTWARE_GPU")
TRITON = importlib.util.find_spec("triton") is not None
launch = None


def replace_builtins_faster() -> None:
    """Let Triton's interpreter look for the functions that it replaces, at each launch and in each call of a
    function within a kernel, once: going through all members of its packages took half of the interpreter's time.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_builtin = importlib.import_module("triton.language.core").is_builtin
    names: dict[object, list[str]] = {}

    def builtins_of(package: object) -> list[tuple[str, object]]:
        if package not in names:  # nothing of it is replaced yet
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        found = [(name, getattr(package, name)) for name in names[package][:1]]
        if not found or not is_builtin(found[0][1]):
            return []  # all are replaced, as in a function that a kernel calls
        return [(name, getattr(package, name)) for name in names[package]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": builtins_of})


if TRITON:
    if not ON_GPU and not SOFTWARE_GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined, Triton's own included
    importlib.import_module("triton.experimental.gluon")
    # The package registers kernels for GPUs, before those for the CPU, if there is a GPU or the interpreter.
    with patch.object(torch.cuda, "is_available", lambda: True) if SOFTWARE_GPU else nullcontext():
        launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
        importlib.import_module("localllm.runtime.kernels")
    if os.environ.pop("TRITON_INTERPRET", None):
        replace_builtins_faster()
    setattr(launch, "takes_cpu", False)  # noqa: B010
