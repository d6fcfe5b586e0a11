"""Imports all GPU kernels, so that they are registered before the ones that support every device."""

from localllm.runtime.kernels.gpu import (
    activations,
    angles,
    causal_conv,
    decode,
    delta_net,
    dequantize,
    experts,
    latent,
    norms,
    prefill,
    quantized_gemm,
    rope_append,
    sampling,
    small_m_linear,
    step,
    w8a8,
)

__all__ = [
    "activations",
    "angles",
    "causal_conv",
    "decode",
    "delta_net",
    "dequantize",
    "experts",
    "latent",
    "norms",
    "prefill",
    "quantized_gemm",
    "rope_append",
    "sampling",
    "small_m_linear",
    "step",
    "w8a8",
]
