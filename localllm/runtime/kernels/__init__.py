"""The operations that models consist of, each a signature with shapes; kernels register as their
implementations.
"""

import importlib.util
import os

import torch

from localllm.hardware.triton_support import triton_fault
from localllm.runtime.kernels.attention import append_and_attend, attention
from localllm.runtime.kernels.causal_conv import causal_conv
from localllm.runtime.kernels.delta_net import delta_net
from localllm.runtime.kernels.elementwise import (
    gated_activation,
    gated_rms_norm,
    l2_normalize,
    layer_norm,
    rms_norm,
    rope_angles,
    rotate,
    sigmoid,
    softplus,
    tanh,
)
from localllm.runtime.kernels.experts import experts, supports_stacked
from localllm.runtime.kernels.fused import fused_linear, prepares_norms, residual_linear
from localllm.runtime.kernels.latent import latent_attention
from localllm.runtime.kernels.linear import linear, prepare_weights
from localllm.runtime.kernels.norm import add_norm
from localllm.runtime.kernels.registry import explain

__all__ = [
    "add_norm",
    "append_and_attend",
    "attention",
    "causal_conv",
    "delta_net",
    "experts",
    "explain",
    "fused_linear",
    "gated_activation",
    "gated_rms_norm",
    "l2_normalize",
    "latent_attention",
    "layer_norm",
    "linear",
    "prepare_weights",
    "prepares_norms",
    "residual_linear",
    "rms_norm",
    "rope_angles",
    "rotate",
    "sigmoid",
    "softplus",
    "supports_stacked",
    "tanh",
    "triton_unsupported",
]

# Only imported where they can run: Triton alone takes a third of a second. Without Triton, torch's own kernels are
# used, and the reason is reported when a model is loaded.
if os.environ.get("TRITON_INTERPRET") == "1":
    triton_loaded = importlib.util.find_spec("triton") is not None
else:
    triton_loaded = torch.cuda.is_available() and triton_fault() is None
if triton_loaded:
    importlib.import_module("localllm.runtime.kernels.gpu.register")


def triton_unsupported(device: torch.device) -> str | None:
    """Return why the kernels of `gpu/` do not support tensors on this device, or None if they do."""
    if not triton_loaded:
        fault = triton_fault() if device.type == "cuda" else None
        return f"torch computes without Triton, because {'; '.join(fault)}" if fault else "needs a GPU"
    launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
    return launch.gpu_unsupported(torch.empty(0, device=device))
