"""Loads all kernels for GPUs, so that they are registered before the ones that take every device."""

from localllm.runtime.kernels.gpu import step

__all__ = ["step"]
