"""Loads the kernels for GPUs as functions of Triton's interpreter, so that they run without a GPU where a test
asks for it (the fixture `interpreter`); all other tests, and the programs that they start, do without."""

import importlib
import os

os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined, Triton's own included
importlib.import_module("triton.experimental.gluon")
launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
importlib.import_module("localllm.runtime.kernels")
del os.environ["TRITON_INTERPRET"]

setattr(launch, "takes_cpu", False)  # noqa: B010
