"""The feed-forward half of a layer: a gated MLP, or a mixture of experts."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import Activation, MLPConfig, ModelConfig, MoEConfig, RouterConfig
from localllm.quant.tensor import concat_matrices
from localllm.runtime import kernels
from localllm.runtime.kernels.experts import StackedExperts
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.norm import identity, load_norm
from localllm.runtime.weight_source import WeightSource


class MLP:
    def __init__(
        self, config: MLPConfig, hidden: int, source: WeightSource, *, summed: bool = True, whole: bool = False
    ):
        """summed: sum up the result over ranks; otherwise the caller does, of several results at once; whole: one
        rank has all of its columns."""
        self.activation: Activation = config.activation
        n = config.intermediate_size
        fused = source.has_matrix("gate_up_proj")
        names = {"gate_up_proj": 2 * n} if fused else {"gate_proj": n, "up_proj": n}
        self.gate_up = Linear.load(source, names, hidden, config.bias)
        self.down = Linear.load(source, {"down_proj": hidden}, n, config.bias, by_columns=not whole, summed=summed)

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + mlp(norm(x)). x: [T, hidden] -> [T, hidden]"""
        gated = self.gate_up(x, norm=norm, activation=self.activation)
        return self.down(gated, residual=residual, following=following)


class UngatedMLP:
    """A feed-forward network without a gate, as in the original transformer."""

    def __init__(self, config: MLPConfig, hidden: int, source: WeightSource):
        self.activation: Activation = config.activation
        self.up = Linear.load(source, {"up_proj": config.intermediate_size}, hidden, config.bias)
        self.down = Linear.load(
            source, {"down_proj": hidden}, config.intermediate_size, config.bias, by_columns=True
        )

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + mlp(norm(x)). x: [T, hidden] -> [T, hidden]"""
        activated = apply_activation(self.up(x, norm=norm), self.activation)
        return self.down(activated, residual=residual, following=following)


def apply_activation(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class MoE:
    def __init__(self, config: MoEConfig, model: ModelConfig, source: WeightSource):
        def norm(name: str) -> Callable[[Tensor], Tensor]:
            return load_norm(source, name, hidden, model) if config.apart else identity

        self.config, hidden = config, model.hidden_size
        self.before_shared, self.after_shared = norm("before_shared"), norm("after_shared")
        self.before_experts, self.after_experts = norm("before_experts"), norm("after_experts")
        self.before_router = router_norm(source, model) if config.router.normed else identity
        self.router = Linear.load(source, {"router": config.experts}, hidden, config.router.bias)
        # In float32, as in training: it is small, and decides between experts with close scores.
        self.score_correction = (
            source.float32_tensor("correction_bias", config.experts) if config.router.correction else None
        )
        self.expert_scale = (
            source.float32_tensor("expert_scale", config.experts) if config.router.expert_scale else None
        )
        self.ranks = source.tensor_ranks
        self.first_expert, end = config.own_experts or (0, config.experts)
        whole = config.own_experts is not None
        experts = [
            MLP(config.expert, hidden, source.under(f"experts.{e}"), summed=False, whole=whole)
            for e in range(self.first_expert, end)
        ]
        like_x = torch.empty(0, hidden, dtype=source.dtype, device=source.device)
        # Kernels of stacked experts expect those of all tokens.
        self.experts = (None if whole else stack_experts(experts, like_x)) or experts
        self.shared = MLP(config.shared, hidden, source.under("shared"), summed=False) if config.shared else None
        self.shared_gate = (
            Linear.load(source, {"shared_gate": 1}, hidden, bias=False) if config.shared_gate else None
        )

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + moe(norm(x)). x: [T, hidden] -> [T, hidden]"""
        out = self.mix_experts(norm(x) if norm else x)
        return out if residual is None else residual + out

    def mix_experts(self, x: Tensor) -> Tensor:
        expert_ids, weight = route(self.router(self.before_router(x)).float(), self.score_correction, self.config)
        if self.expert_scale is not None:
            weight = weight * self.expert_scale[expert_ids]
        if self.config.own_experts:  # others' have ids outside of the list, and other ranks compute them
            expert_ids = expert_ids - self.first_expert
        routed = kernels.experts(self.before_experts(x), expert_ids, weight, self.experts)
        shared = self.shared(self.before_shared(x)) if self.shared else None
        if self.config.apart:
            assert shared is not None
            if self.ranks:  # before the norms
                routed, shared = self.ranks.all_reduce(torch.stack((routed, shared)))
            return self.after_experts(routed) + self.after_shared(shared)
        if shared is not None:
            routed = routed + (kernels.sigmoid(self.shared_gate(x)) * shared if self.shared_gate else shared)
        return self.ranks.all_reduce(routed) if self.ranks else routed


def stack_experts(mlps: list[MLP], x: Tensor) -> StackedExperts | None:
    """Stack the experts for the kernel that takes them so; None if it does not support x or experts differ in
    format.
    """
    if any(len(linear.weights) > 1 for mlp in mlps for linear in (mlp.gate_up, mlp.down)):
        return None
    first = mlps[0]
    one = StackedExperts(first.gate_up.weights[0], first.down.weights[0], None, None, first.activation, 1)
    if not kernels.supports_stacked(x, one):
        return None
    projections = [mlp.gate_up for mlp in mlps], [mlp.down for mlp in mlps]
    gate_up, down = (concat_matrices([linear.weights[0] for linear in linears]) for linears in projections)
    if gate_up is None or down is None:
        return None
    biases = ([linear.bias for linear in linears if linear.bias is not None] for linears in projections)
    gate_up_bias, down_bias = (torch.cat(linears) if linears else None for linears in biases)
    return StackedExperts(gate_up, down, gate_up_bias, down_bias, first.activation, len(mlps))


def route(logits: Tensor, correction: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Select experts. logits: [T, experts] float32; correction: [experts] -> their ids and weights, [T, k] each"""
    router = config.router
    score = logits.softmax(-1) if router.score == "softmax" else kernels.sigmoid(logits)
    ranked = score if correction is None else score + correction
    if router.groups > 1:
        ranked = mask_other_groups(ranked, router)
    expert_ids = ranked.topk(config.experts_per_token, -1).indices
    weight = score.gather(-1, expert_ids)
    if router.normalize:
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-20)
    return expert_ids, weight * router.scale


def mask_other_groups(ranked: Tensor, router: RouterConfig) -> Tensor:
    """Set the scores outside the best groups to -inf (DeepSeek-V3, section 2.1.2)."""
    grouped = ranked.unflatten(-1, (router.groups, -1))  # [T, groups, experts / groups]
    best = (
        grouped.topk(min(router.judged_by, grouped.shape[-1]), -1)
        .values.sum(-1)
        .topk(router.chosen_groups, -1)
        .indices
    )
    is_best = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, True)
    return grouped.masked_fill(~is_best[..., None], -torch.inf).flatten(1)


def router_norm(source: WeightSource, model: ModelConfig) -> Norm:
    weight = source.norm_weight("before_router.weight", model.hidden_size) * model.hidden_size**-0.5
    return Norm(weight, model.norm_eps)


def load_ffn(config: MLPConfig | MoEConfig, model: ModelConfig, source: WeightSource) -> MLP | UngatedMLP | MoE:
    if isinstance(config, MoEConfig):
        return MoE(config, model, source)
    return (MLP if config.gated else UngatedMLP)(config, model.hidden_size, source)
