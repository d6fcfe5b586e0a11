"""Hybrids: most layers are recurrent, with a state of constant size."""

from dataclasses import replace
from typing import Any

from localllm.arch.config import (
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    ShortConvConfig,
)
from localllm.arch.families.shared import SHARED_EXPERTS, family, sparse_steps
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import TensorLayout
from localllm.arch.parts import (
    activation,
    attention,
    decoder,
    delta_net,
    layer_count,
    layer_types,
    mlp,
    moe,
)

QWEN_HYBRID = replace(SHARED_EXPERTS, norm_offset=1.0, unused=(r"mtp\..*",))  # mtp layers predict further tokens
QWEN_HYBRID_FIELDS: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


@family(
    "Qwen3NextForCausalLM",
    layout=QWEN_HYBRID,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    num_key_value_heads=2,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    **QWEN_HYBRID_FIELDS,
)
def qwen3_next(hf: ConfigFields) -> ModelConfig:
    return decoder(hf, qwen_hybrid_mixers(hf), sparse_steps(hf, qwen_hybrid_experts(hf)))


@family(
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    layout=QWEN_HYBRID,
    num_key_value_heads=4,
    **QWEN_HYBRID_FIELDS,
)
def qwen3_5(hf: ConfigFields) -> ModelConfig:
    return decoder(hf, qwen_hybrid_mixers(hf), mlp(hf))


@family(
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    layout=QWEN_HYBRID,
    num_key_value_heads=2,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    **QWEN_HYBRID_FIELDS,
)
def qwen3_5_moe(hf: ConfigFields) -> ModelConfig:
    return decoder(hf, qwen_hybrid_mixers(hf), qwen_hybrid_experts(hf))


def qwen_hybrid_mixers(hf: ConfigFields) -> list[Mixer]:
    every = hf.size("full_attention_interval")
    types = layer_types(hf, ("linear_attention", "full_attention")) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layer_count(hf))
    ]
    bias = hf.flag("attention_bias")
    attention_config = attention(hf, qk_norm="per_head", output_gate=True, qkv_bias=bias, out_bias=bias)
    delta_net_config = delta_net(hf)
    return [delta_net_config if layer_type == "linear_attention" else attention_config for layer_type in types]


def qwen_hybrid_experts(hf: ConfigFields) -> MoEConfig:
    router = RouterConfig(normalize=hf.flag("norm_topk_prob", True))
    shared = MLPConfig(hf.size("shared_expert_intermediate_size"), activation(hf))
    size = "moe_intermediate_size"
    return moe(hf, hf.size("num_experts"), router, size_field=size, shared=shared, shared_gate=True)


LFM2 = TensorLayout(
    names=(
        (r"\.operator_norm\.", ".before_mixer."),
        (r"\.ffn_norm\.", ".before_ffn."),
        (r"^embedding_norm\.", "norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
        (r"\.feed_forward\.gate\.", ".mlp.router."),
        (r"\.feed_forward\.expert_bias", ".mlp.correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )
)
LFM2_FIELDS: dict[str, Any] = {
    "rope_theta": 1e6,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}


@family("Lfm2ForCausalLM", layout=LFM2, block_multiple_of=256, **LFM2_FIELDS)
def lfm2(hf: ConfigFields) -> ModelConfig:
    width = hf.size("block_ff_dim", None) or hf.size("intermediate_size")
    if hf.flag("block_auto_adjust_ff_dim", True):
        multiple = hf.size("block_multiple_of")
        width = int(hf.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return lfm2_decoder(hf, MLPConfig(width))


@family(
    "Lfm2MoeForCausalLM",
    layout=LFM2,
    num_dense_layers=2,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=1792,
    **LFM2_FIELDS,
)
def lfm2_moe(hf: ConfigFields) -> ModelConfig:
    router = RouterConfig(
        score="sigmoid",
        normalize=hf.flag("norm_topk_prob", True),
        correction=hf.flag("use_expert_bias", True),
        scale=hf.number("routed_scaling_factor", 1.0),
    )
    experts = moe(hf, hf.size("num_experts"), router, size_field="moe_intermediate_size")
    dense = hf.count("num_dense_layers")
    return lfm2_decoder(hf, [mlp(hf) if i < dense else experts for i in range(layer_count(hf))])


def lfm2_decoder(hf: ConfigFields, ffn: MLPConfig | list[MLPConfig | MoEConfig]) -> ModelConfig:
    attending = hf.ids("full_attn_idxs") if hf.has("full_attn_idxs") else range(layer_count(hf))
    types = layer_types(hf, ("conv", "full_attention")) or [
        "full_attention" if i in attending else "conv" for i in range(layer_count(hf))
    ]
    attention_config = attention(hf, qk_norm="per_head")
    conv_config = ShortConvConfig(hf.size("hidden_size"), hf.size("conv_L_cache"), hf.flag("conv_bias"))
    return decoder(
        hf,
        [conv_config if layer_type == "conv" else attention_config for layer_type in types],
        ffn,
        norm_eps=hf.number("norm_eps"),
        tie_embeddings=hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
    )
