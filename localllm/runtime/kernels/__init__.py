"""The operations that a model is made of, each a signature with shapes; the kernels behind them register here."""

from localllm.runtime.kernels.attention import attention
from localllm.runtime.kernels.elementwise import gated, layer_norm, rms_norm, rotate
from localllm.runtime.kernels.experts import experts
from localllm.runtime.kernels.latent import latent_attention
from localllm.runtime.kernels.linear import linear
from localllm.runtime.kernels.registry import explain

__all__ = [
    "attention",
    "experts",
    "explain",
    "gated",
    "latent_attention",
    "layer_norm",
    "linear",
    "rms_norm",
    "rotate",
]
