"""The feed-forward half of a layer: one gated MLP, or a mixture of them."""

from torch import Tensor

from localllm.arch.config import Activation, MLPConfig, MoEConfig
from localllm.runtime import kernels
from localllm.runtime.layers.linear import Linear
from localllm.runtime.load import Source


class MLP:
    def __init__(self, config: MLPConfig, hidden: int, source: Source):
        self.activation: Activation = config.activation
        n = config.intermediate_size
        fused = source.has("gate_up_proj.weight")
        names = {"gate_up_proj": 2 * n} if fused else {"gate_proj": n, "up_proj": n}
        self.gate_up = Linear.load(source, names, hidden, config.bias)
        self.down = Linear.load(source, {"down_proj": hidden}, n, config.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, hidden]"""
        return self.down(kernels.gated(self.gate_up(x), self.activation))


class MoE:
    def __init__(self, config: MoEConfig, hidden: int, source: Source):
        self.config = config
        self.router = Linear.load(source, {"router": config.experts}, hidden, config.router_bias)
        self.experts = [MLP(config.expert, hidden, source.under(f"experts.{e}")) for e in range(config.experts)]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, hidden]"""
        return kernels.experts(x, *self.choose(self.router(x).float()), self.experts)

    def choose(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """score: [T, experts] float32 -> the chosen experts and their weights, [T, k] each"""
        top = score.topk(self.config.experts_per_token, -1)
        if self.config.normalize:
            return top.indices, top.values.softmax(-1)
        return top.indices, score.softmax(-1).gather(-1, top.indices)


def load_ffn(config: MLPConfig | MoEConfig, hidden: int, source: Source) -> MLP | MoE:
    return MoE(config, hidden, source) if isinstance(config, MoEConfig) else MLP(config, hidden, source)
