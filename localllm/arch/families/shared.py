"""Parts that several families share: windows by layer, shared experts, layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    MLPConfig,
    ModelConfig,
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

Describe = Callable[[ConfigFields], ModelConfig]


@dataclass(frozen=True)
class Family:
    """`defaults`: fields that this family's config.json may omit, with the values of its `transformers` class."""

    describe: Describe
    layout: TensorLayout | Callable[[ConfigFields], TensorLayout]
    defaults: Mapping[str, Any]


FAMILIES: dict[str, Family] = {}  # by the class named in `architectures` of config.json


def family(
    *architectures: str,
    layout: TensorLayout | Callable[[ConfigFields], TensorLayout] | None = None,
    **defaults: Any,
) -> Callable[[Describe], Describe]:
    def register(describe: Describe) -> Describe:
        FAMILIES.update(dict.fromkeys(architectures, Family(describe, layout or TensorLayout(), defaults)))
        return describe

    return register


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


def ignore_mtp_layers(layout_with_mtp: TensorLayout) -> Callable[[ConfigFields], TensorLayout]:
    """Return a layout that skips multi-token prediction layers, which follow the model's own."""

    def layout(hf: ConfigFields) -> TensorLayout:
        layers = layer_count(hf)
        mtp_layers = min(hf.count("num_nextn_predict_layers"), layers)
        return replace(layout_with_mtp, unused=layer_patterns(range(layers, layers + mtp_layers), ".*"))

    return layout


def qwen_windows(hf: ConfigFields) -> list[int | None]:
    """Return each layer's sliding window, from `layer_types` or Qwen's `max_window_layers`."""
    layers = layer_count(hf)
    if not hf.flag("use_sliding_window"):
        return [None] * layers
    types = layer_types(hf) or [
        "sliding_attention" if i >= hf.size("max_window_layers") else "full_attention" for i in range(layers)
    ]
    return [hf.size("sliding_window") if layer_type == "sliding_attention" else None for layer_type in types]


def alternating(hf: ConfigFields, *, every: int, **changes: Any) -> list[AttentionConfig]:
    """Return one attention per layer, with full attention in each `every`th layer unless `layer_types` exists.

    Old configurations scale the rope of full layers only, and may have `rope_local_base_freq` for the others.
    """
    types = layer_types(hf) or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layer_count(hf))
    ]
    full = attention(hf, **changes)
    sliding = replace(full, window=hf.size("sliding_window"))
    if hf.section("rope_parameters").has("full_attention"):
        full = replace(full, rope=rope(hf, full.head_dim, layer_type="full_attention"))
        sliding = replace(sliding, rope=rope(hf, full.head_dim, layer_type="sliding_attention"))
    elif hf.has("rope_local_base_freq"):
        sliding = replace(sliding, rope=RopeConfig(hf.number("rope_local_base_freq"), full.head_dim))
    return [sliding if layer_type == "sliding_attention" else full for layer_type in types]


def sparse_steps(hf: ConfigFields, experts: MoEConfig) -> list[MLPConfig | MoEConfig]:
    """Return experts in each `decoder_sparse_step`th layer, except `mlp_only_layers` (the rule of
    transformers).
    """
    dense, every = hf.ids("mlp_only_layers"), hf.size("decoder_sparse_step")
    return [mlp(hf) if i in dense or (i + 1) % every else experts for i in range(layer_count(hf))]


def experts_with_shared(hf: ConfigFields, router: RouterConfig) -> MoEConfig:
    """Parse DeepSeek's MoE layers: the shared experts are one MLP of their total size."""
    shared = MLPConfig(hf.size("moe_intermediate_size") * hf.size("n_shared_experts"), activation(hf))
    return moe(hf, hf.size("n_routed_experts"), router, size_field="moe_intermediate_size", shared=shared)


def qwen3_mixer(hf: ConfigFields) -> AttentionConfig:
    bias = hf.flag("attention_bias")
    return attention(hf, qk_norm="per_head", qkv_bias=bias, out_bias=bias)
