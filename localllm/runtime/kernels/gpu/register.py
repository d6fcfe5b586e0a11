"""Loads all kernels for GPUs, so that they are registered before the ones that take every device."""

import localllm.runtime.kernels.gpu.dequantize
import localllm.runtime.kernels.gpu.experts
import localllm.runtime.kernels.gpu.gemm  # noqa: F401
