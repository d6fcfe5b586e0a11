"""Load the kernels for GPUs as functions of Triton's interpreter, which the fixture `interpreter` enables in a
test. With a GPU they are compiled for it; without Triton, as on macOS and Arm, there are none.

With a seed in the environment variable SOFTWARE_GPU, they are compiled to PTX instead, which tools/ptx executes
(tests/software_gpu.py)."""

import importlib.util
import os

import torch

ON_GPU = torch.cuda.is_available()
SOFTWARE_GPU = os.environ.get("SOFTWARE_GPU")
TRITON = importlib.util.find_spec("triton") is not None
launch = None

if TRITON:
    if not ON_GPU and not SOFTWARE_GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined, Triton's own included
    importlib.import_module("triton.experimental.gluon")
    launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
    kernels = importlib.import_module("localllm.runtime.kernels")
    if SOFTWARE_GPU:  # the package loads them for CUDA and the interpreter
        importlib.import_module("localllm.runtime.kernels.gpu.register")
        setattr(kernels, "triton_loaded", True)  # noqa: B010
    os.environ.pop("TRITON_INTERPRET", None)
    setattr(launch, "takes_cpu", False)  # noqa: B010
