"""The gated MLP."""

from torch import Tensor

from localllm.arch.config import MLPConfig
from localllm.runtime import kernels
from localllm.runtime.layers.linear import Linear
from localllm.runtime.load import Source


class MLP:
    def __init__(self, config: MLPConfig, hidden: int, source: Source):
        n = config.intermediate_size
        self.gate_up = Linear.load(source, {"gate_proj": n, "up_proj": n}, hidden, config.bias)
        self.down = Linear.load(source, {"down_proj": hidden}, n, config.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, hidden]"""
        return self.down(kernels.gated_silu(self.gate_up(x)))
