"""Latent attention: DeepSeek and related models."""

from dataclasses import replace

from localllm.arch.config import (
    ModelConfig,
    RouterConfig,
)
from localllm.arch.families.shared import SHARED_EXPERTS, experts_with_shared, family, ignore_mtp_layers
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import TensorLayout
from localllm.arch.parts import (
    decoder,
    latent_attention,
    layer_count,
    sigmoid_router,
    sparse_after_dense,
)

LATENT = TensorLayout(
    names=(
        *SHARED_EXPERTS.names,
        (r"\.kv_a_proj_with_mqa\.", ".kv_a_proj."),
        (r"\.(q|kv)_a_layernorm\.", r".\1_a_norm."),
    )
)


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
