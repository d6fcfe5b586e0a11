"""Loads all kernels for GPUs, so that they are registered before the ones that take every device."""

<<<<<<< HEAD
from localllm.runtime.kernels.gpu import skinny_linear as skinny_linear
=======
from localllm.runtime.kernels.gpu import step

__all__ = ["step"]
>>>>>>> main
