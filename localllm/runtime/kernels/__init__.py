"""The operations that a model is made of, each a signature with shapes; the kernels behind them register here."""

import importlib.util
import os

import torch

from localllm.runtime.kernels.add_normed import add_normed
from localllm.runtime.kernels.attention import attention
from localllm.runtime.kernels.causal_conv import causal_conv
from localllm.runtime.kernels.delta_net import delta_net
from localllm.runtime.kernels.elementwise import (
    angles,
    gated,
    gated_rms_norm,
    layer_norm,
    rms_norm,
    rotate,
    sigmoid,
    softplus,
    tanh,
    unit,
)
from localllm.runtime.kernels.experts import experts, takes_stacked
from localllm.runtime.kernels.fused import fused_linear
from localllm.runtime.kernels.latent import latent_attention
from localllm.runtime.kernels.linear import linear, prepared
from localllm.runtime.kernels.registry import explain
from localllm.runtime.kernels.rope_append import rope_append

__all__ = [
    "add_normed",
    "angles",
    "attention",
    "causal_conv",
    "delta_net",
    "experts",
    "explain",
    "fused_linear",
    "gated",
    "gated_rms_norm",
    "latent_attention",
    "layer_norm",
    "linear",
    "prepared",
    "rms_norm",
    "rope_append",
    "rotate",
    "sigmoid",
    "softplus",
    "takes_stacked",
    "tanh",
    "triton_runs_on",
    "unit",
]

# Where nothing can run them they are not loaded: Triton alone takes a third of a second. Where it is not installed
# torch's own kernels do all, and `localllm doctor` says what is missing.
wanted = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
triton_loaded = wanted and importlib.util.find_spec("triton") is not None
if triton_loaded:
    importlib.import_module("localllm.runtime.kernels.gpu.register")


def triton_runs_on(device: torch.device) -> bool:
    """Do the kernels of `gpu/` take tensors of this device?"""
    if not triton_loaded:
        return False
    launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
    return launch.needs_gpu(torch.empty(0, device=device)) is None
