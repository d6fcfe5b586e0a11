"""The oracle table: every family with the config of a tiny checkpoint whose sizes differ from defaults."""

from typing import Any

from tests.tiny import LLAMA3_ROPE

WINDOW_OF_SOME = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 20.0,
    "beta_slow": 1.5,
    "original_max_position_embeddings": 64,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
    "tie_word_embeddings": True,
}

LATENT: dict[str, Any] = {
    "head_dim": 8,  # for transformers' rope
    "num_key_value_heads": 6,
    "q_lora_rank": 22,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}

LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.1, 1.3, 1.7],
        "long_factor": [1.5, 4.0, 8.0],
    },
    "head_dim": 8,
    "sliding_window": None,
    "tie_word_embeddings": True,
}

DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
}
SHARED_EXPERT = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
SHORT_CONV: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 4,
    "norm_eps": 1e-3,
    "head_dim": 8,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {"num_key_value_heads": 6}),
    "Llama, default head size": ("Llama", {"head_dim": None}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, one kv head": ("Llama", {"num_key_value_heads": 1, "head_dim": 18}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 3.x": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "Llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    ),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, window": ("Mistral", {"sliding_window": 9}),
    "Ministral": ("Ministral", ALTERNATING),
    "Ministral 3": (
        "Ministral3",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}},
    ),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, tied, some windows": ("Qwen2", {"tie_word_embeddings": True, **WINDOW_OF_SOME}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3, tied, biases, some windows": (
        "Qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, **WINDOW_OF_SOME},
    ),
    "Qwen3-MoE": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "Qwen3-MoE, some dense": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "GLM-4.5": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 12,
            "rope_parameters": {"rope_theta": 90.0, "partial_rotary_factor": 0.5},
        },
    ),
    "DeepSeek-V3": ("DeepseekV3", LATENT | {"rope_interleave": False}),
    "DeepSeek-V3, YaRN, whole queries, biases": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "GLM-4.7-Flash": (
        "Glm4MoeLite",
        {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
        | {
            "v_head_dim": 28,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "DeepSeek-V2": ("DeepseekV2", LATENT | {"topk_method": "group_limited_greedy"}),
    "DeepSeek-V2-Lite": ("DeepseekV2", LATENT | {"topk_method": "greedy", "q_lora_rank": None}),
    "Mixtral": ("Mixtral", EXPERTS | {"sliding_window": None}),
    "Gemma 2": (
        "Gemma2",
        {
            **ALTERNATING,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 15,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": (
        "Gemma3",
        {
            **ALTERNATING,
            "rope_parameters": TWO_ROPES,
            "query_pre_attn_scalar": 15,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 4, like E2B": (
        "Gemma4",
        GEMMA4
        | {
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 330,
            "hidden_size_per_layer_input": 14,
            "attention_bias": True,
        },
    ),
    "Gemma 4, like 31B": (
        "Gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 3, "final_logit_softcapping": 5.0},
    ),
    "Gemma 4, like 26B-A4B": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "Gemma 4, all at once": (
        "Gemma4",
        GEMMA4
        | {
            "head_dim": 6,
            "global_head_dim": 8,
            "layer_types": None,
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "hidden_size_per_layer_input": 14,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "Phi-3": ("Phi3", {"sliding_window": None}),
    "Phi-4-mini, beyond its original context": ("Phi3", LONG_ROPE | {"original_max_position_embeddings": 32}),
    "Phi-4-mini": ("Phi3", LONG_ROPE | {"original_max_position_embeddings": 128}),
    "gpt-oss": (
        "GptOss",
        {**ALTERNATING, **EXPERTS, "attention_bias": True, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", {**ALTERNATING, "rope_parameters": TWO_ROPES}),
    "Granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "GLM-4": (
        "Glm4",
        {"attention_bias": True, "rope_parameters": {"rope_theta": 90.0, "partial_rotary_factor": 0.4}},
    ),
    "Command R7B": (
        "Cohere2",
        {**ALTERNATING, "logit_scale": 0.4, "layer_norm_eps": 1e-3, "tie_word_embeddings": True},
    ),
    "Qwen3-Next": (
        "Qwen3Next",
        {**DELTA_NET, **SHARED_EXPERT, "norm_topk_prob": True, "layer_types": None, "full_attention_interval": 3},
    ),
    "Qwen3-Next, some dense": (
        "Qwen3Next",
        {**DELTA_NET, **SHARED_EXPERT, "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "Qwen3.5": ("Qwen3_5", {**DELTA_NET, "tie_word_embeddings": True}),
    "Qwen3.5, as many key heads": ("Qwen3_5", {**DELTA_NET, "linear_num_key_heads": 4}),
    "Qwen3.5-MoE": ("Qwen3_5Moe", {**DELTA_NET, **SHARED_EXPERT}),
    "LFM2": ("Lfm2", {**SHORT_CONV, "conv_bias": True, "block_multiple_of": 16}),
    "LFM2, width as it is": ("Lfm2", {**SHORT_CONV, "conv_L_cache": 2, "block_auto_adjust_ff_dim": False}),
    "LFM2-MoE": (
        "Lfm2Moe",
        {
            **SHORT_CONV,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
}

# What the keys of GGUF cannot say, and no file in circulation needs.
NOT_IN_GGUF = {
    "Mistral, window",
    "Ministral",
    "Qwen2, tied, some windows",
    "Qwen3, tied, biases, some windows",
    "Qwen3-MoE, some dense",
    "Qwen3-Next, some dense",
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
OTHERWISE_IN_GGUF: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {"rope_interleave": True, "scoring_func": "sigmoid"},
    "DeepSeek-V3, YaRN, whole queries, biases": {
        "attention_bias": False,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16},
    },
    "DeepSeek-V2": {"norm_topk_prob": False, "scoring_func": "softmax"},
    "DeepSeek-V2-Lite": {"norm_topk_prob": False, **ONE_GROUP},
    "GLM-4.7-Flash": {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1},
    "Gemma 2": {"query_pre_attn_scalar": 10},  # always the size of a head, but in the largest models
    "Gemma 3": {"query_pre_attn_scalar": 10},
    "Gemma 4, like E2B": {"attention_bias": False},
    "LFM2": {"conv_bias": False},
    "LFM2-MoE": {"routed_scaling_factor": 1.0},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5},
}
