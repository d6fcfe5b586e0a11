"""Pieces that several families share: windows by layer, experts beside shared ones, layouts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
)
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import LLAMA, TensorLayout, layer_patterns
from localllm.arch.parts import (
    activation,
    attention,
    layer_count,
    layer_types,
    mlp,
    moe,
    rope,
)

SANDWICH = TensorLayout(
    names=(
        (r"\.input_layernorm\.", ".before_mixer."),
        (r"\.post_attention_layernorm\.", ".after_mixer."),
        (r"\.pre_feedforward_layernorm\.", ".before_ffn."),
        (r"\.post_feedforward_layernorm\.", ".after_ffn."),
    )
)


SHARED_EXPERTS = TensorLayout(
    names=(
        *LLAMA,
        (r"\.mlp\.gate\.e_score_correction_bias", ".mlp.correction_bias"),
        (r"\.mlp\.gate\.", ".mlp.router."),
        (r"\.mlp\.shared_experts?\.", ".mlp.shared."),
        (r"\.mlp\.shared_expert_gate\.", ".mlp.shared_gate."),
    )
)


def ignore_mtp_layers(found: TensorLayout) -> Callable[[ConfigFields], TensorLayout]:
    """Layers behind the model's own that guess further tokens are not read (multi-token prediction)."""

    def layout(hf: ConfigFields) -> TensorLayout:
        layers = layer_count(hf)
        more = min(hf.count("num_nextn_predict_layers"), layers)
        return replace(found, unused=layer_patterns(range(layers, layers + more), ".*"))

    return layout


def qwen_windows(hf: ConfigFields) -> list[int | None]:
    """Each layer's sliding window: by `layer_types`, else by Qwen's `max_window_layers`."""
    layers = layer_count(hf)
    if not hf.flag("use_sliding_window"):
        return [None] * layers
    kinds = layer_types(hf) or [
        "sliding_attention" if i >= hf.size("max_window_layers") else "full_attention" for i in range(layers)
    ]
    return [hf.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds]


def alternating(hf: ConfigFields, *, every: int, **changes: Any) -> list[AttentionConfig]:
    """One attention a layer: windows, with full attention in each `every`th layer where `layer_types` is missing.

    Old configurations scale the rope of the full layers alone, and may have `rope_local_base_freq` for the others.
    """
    kinds = layer_types(hf) or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layer_count(hf))
    ]
    full = attention(hf, **changes)
    sliding = replace(full, window=hf.size("sliding_window"))
    if hf.section("rope_parameters").has("full_attention"):
        full = replace(full, rope=rope(hf, full.head_dim, layer_type="full_attention"))
        sliding = replace(sliding, rope=rope(hf, full.head_dim, layer_type="sliding_attention"))
    elif hf.has("rope_local_base_freq"):
        sliding = replace(sliding, rope=RopeConfig(hf.number("rope_local_base_freq"), full.head_dim))
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


def sparse_steps(hf: ConfigFields, experts: MoEConfig) -> list[MLPConfig | MoEConfig]:
    """Experts in each `decoder_sparse_step`th layer, but for `mlp_only_layers` (transformers' own rule)."""
    dense, every = hf.ids("mlp_only_layers"), hf.size("decoder_sparse_step")
    return [mlp(hf) if i in dense or (i + 1) % every else experts for i in range(layer_count(hf))]


def experts_with_shared(hf: ConfigFields, router: RouterConfig) -> MoEConfig:
    """DeepSeek's mixtures: the shared experts are one MLP of their joint size."""
    shared = MLPConfig(hf.size("moe_intermediate_size") * hf.size("n_shared_experts"), activation(hf))
    return moe(hf, hf.size("n_routed_experts"), router, size_field="moe_intermediate_size", shared=shared)


def qwen3_mixer(hf: ConfigFields) -> AttentionConfig:
    bias = hf.flag("attention_bias")
    return attention(hf, qk_norm="per_head", qkv_bias=bias, out_bias=bias)
