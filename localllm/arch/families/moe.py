"""Mixtures of experts: Mixtral, Qwen, GLM, gpt-oss, and DeepSeek with latent attention."""

from dataclasses import replace

from localllm.arch.config import (
    ModelConfig,
    RouterConfig,
)
from localllm.arch.families.shared import (
    SHARED_EXPERTS,
    alternating,
    experts_with_shared,
    family,
    ignore_mtp_layers,
    qwen3_mixer,
    sparse_steps,
)
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import LLAMA, TensorLayout
from localllm.arch.parts import (
    attention,
    decoder,
    latent_attention,
    layer_count,
    moe,
    sigmoid_router,
    sparse_after_dense,
)
from localllm.errors import UnsupportedModel

LATENT = TensorLayout(
    names=(
        *SHARED_EXPERTS.names,
        (r"\.kv_a_proj_with_mqa\.", ".kv_a_proj."),
        (r"\.(q|kv)_a_layernorm\.", r".\1_a_norm."),
    )
)


@family(
    "MixtralForCausalLM",
    layout=TensorLayout(
        names=(
            *LLAMA,
            (r"\.block_sparse_moe\.gate\.", ".mlp.router."),
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.mlp\.gate\.", ".mlp.router."),
            (r"\.w1\.", ".gate_proj."),
            (r"\.w2\.", ".down_proj."),
            (r"\.w3\.", ".up_proj."),
        )
    ),
    num_key_value_heads=8,
    rope_theta=1e6,
)
def mixtral(hf: ConfigFields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    experts = moe(hf, hf.size("num_local_experts"), RouterConfig(), size_field="intermediate_size")
    return decoder(hf, [mixer] * layer_count(hf), experts)


@family(
    "Qwen3MoeForCausalLM",
    layout=TensorLayout(names=(*LLAMA, (r"\.mlp\.gate\.", ".mlp.router."))),
    decoder_sparse_step=1,
    num_key_value_heads=4,
    sliding_window=4096,
)
def qwen3_moe(hf: ConfigFields) -> ModelConfig:
    count = hf.size("num_experts", None) or hf.size("num_local_experts")
    router = RouterConfig(normalize=hf.flag("norm_topk_prob"))
    experts = moe(hf, count, router, size_field="moe_intermediate_size")
    window = hf.size("sliding_window") if hf.flag("use_sliding_window") else None
    mixer = replace(qwen3_mixer(hf), window=window)
    return decoder(hf, [mixer] * layer_count(hf), sparse_steps(hf, experts))


@family(
    "Glm4MoeForCausalLM",
    layout=ignore_mtp_layers(SHARED_EXPERTS),
    partial_rotary_factor=0.5,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
def glm4_moe(hf: ConfigFields) -> ModelConfig:
    experts = experts_with_shared(hf, sigmoid_router(hf))
    qk_norm = "per_head" if hf.flag("use_qk_norm") else None
    mixer = attention(hf, qk_norm=qk_norm, qkv_bias=hf.flag("attention_bias"))
    return decoder(hf, [mixer] * layer_count(hf), sparse_after_dense(hf, experts))


@family(
    "GptOssForCausalLM",
    layout=TensorLayout(experts_transposed=True, gate_up_interleaved=True),
    sliding_window=128,
    rope_theta=150000.0,
    attention_bias=True,
    head_dim=64,
    num_key_value_heads=8,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
)
def gpt_oss(hf: ConfigFields) -> ModelConfig:
    if (hf.number("swiglu_limit", 7.0), hf.number("swiglu_alpha", 1.702)) != (7.0, 1.702):
        raise UnsupportedModel(
            "a swiglu_limit other than 7 or a swiglu_alpha other than 1.702 is not supported",
            "use the published gpt-oss models",
        )
    bias = hf.flag("attention_bias")
    experts = moe(hf, hf.size("num_local_experts"), RouterConfig(bias=True), size_field="intermediate_size")
    clamped = replace(experts.expert, activation="swiglu_clamped", bias=True)
    mixers = alternating(hf, every=2, sinks=True, qkv_bias=bias, out_bias=bias)
    return decoder(hf, mixers, replace(experts, expert=clamped))


@family(
    "DeepseekV3ForCausalLM",
    layout=ignore_mtp_layers(LATENT),
    q_lora_rank=None,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope_interleave=True,
    num_nextn_predict_layers=1,
)
@family(
    "Glm4MoeLiteForCausalLM",
    layout=ignore_mtp_layers(LATENT),
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    first_k_dense_replace=1,
    rope_interleave=True,
    num_nextn_predict_layers=1,
)
def deepseek_v3(hf: ConfigFields) -> ModelConfig:
    experts = experts_with_shared(hf, sigmoid_router(hf))
    return decoder(hf, [latent_attention(hf)] * layer_count(hf), sparse_after_dense(hf, experts))


@family(
    "DeepseekV2ForCausalLM", layout=LATENT, topk_method="greedy", routed_scaling_factor=1.0, rope_interleave=True
)
def deepseek_v2(hf: ConfigFields) -> ModelConfig:
    router = RouterConfig(normalize=False, scale=hf.number("routed_scaling_factor"))
    if hf.text("topk_method") == "group_limited_greedy":
        router = replace(router, groups=hf.size("n_group"), chosen_groups=hf.size("topk_group"), judged_by=1)
    experts = experts_with_shared(hf, router)
    return decoder(hf, [latent_attention(hf)] * layer_count(hf), sparse_after_dense(hf, experts))
