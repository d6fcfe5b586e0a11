"""Loads all kernels for GPUs, so that they are registered before the ones that take every device."""

from localllm.runtime.kernels.gpu import (
    activations,
    angles,
    causal_conv,
    decode,
    delta_net,
    dequantize,
    experts,
    gemm,
    latent,
    layout,
    norms,
    prefill,
    rope_append,
    sampling,
    skinny_linear,
    step,
)

__all__ = [
    "activations",
    "angles",
    "causal_conv",
    "decode",
    "delta_net",
    "dequantize",
    "experts",
    "gemm",
    "latent",
    "layout",
    "norms",
    "prefill",
    "rope_append",
    "sampling",
    "skinny_linear",
    "step",
]
