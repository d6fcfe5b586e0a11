"""Load the kernels for GPUs as functions of Triton's interpreter, which the fixture `interpreter` enables in a
test. With a GPU they are compiled for it; without Triton, as on macOS and Arm, there are none."""

import importlib.util
import os

import torch

ON_GPU = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
launch = None

if TRITON:
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined, Triton's own included
    importlib.import_module("triton.experimental.gluon")
    launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
    importlib.import_module("localllm.runtime.kernels")
    os.environ.pop("TRITON_INTERPRET", None)
    setattr(launch, "takes_cpu", False)  # noqa: B010
