"""Loads all kernels for GPUs, so that they are registered before the ones that take every device."""

from localllm.runtime.kernels.gpu import dequantize, experts, gemm, layout, skinny_linear, step

__all__ = ["dequantize", "experts", "gemm", "layout", "skinny_linear", "step"]
