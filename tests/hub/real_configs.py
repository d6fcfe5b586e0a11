"""Configurations of models of the catalogue, shortened to the fields that determine parameter counts.

Those of `tests/arch/test_published_configs.py` are not repeated here. The values are copied from: [l]
Lightning-AI/litgpt's config.py, which names the file of each; [k] kvcache-ai/kvcache-blog, read from the
repositories in May 2026; [t] defaults of the class in `transformers` that names the checkpoint; [o] ollama's tests
of its own readers; [d] configurations or model cards quoted in full in documents. Fields that a source omits are
chosen so that the parameters match the model card.
"""

from typing import Any

from tests.arch.test_published_configs import IN_BILLIONS, PUBLISHED


def dense(
    family: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        **more,
    }


def seeing(family: str, text: dict[str, Any]) -> dict[str, Any]:
    """Wrap the configuration of a text model in that of a multimodal one."""
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
    }


TIED: dict[str, Any] = {"tie_word_embeddings": True}
HEADS_OF_128: dict[str, Any] = {"head_dim": 128}
GEMMA2: dict[str, Any] = TIED | {"head_dim": 256, "query_pre_attn_scalar": 256}
GEMMA3: dict[str, Any] = GEMMA2 | {"sliding_window": 1024, "rope_local_base_freq": 10000}
GRANITE: dict[str, Any] = TIED | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
EXPERTS_OF_QWEN3: dict[str, Any] = HEADS_OF_128 | {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    }
}


def qwen3_5(hidden: int, inner: int, layers: int, heads: int, kv: int, values: int, **more: Any) -> dict[str, Any]:
    """values: number of value heads of the delta nets."""
    text = dense("", hidden, inner, layers, heads, kv, 248320, 262144, linear_num_value_heads=values, **more)
    return seeing("Qwen3_5", text | {"head_dim": 256})


def gemma3(hidden: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return seeing(
        "Gemma3", dense("", hidden, inner, layers, heads, kv, 262208, 131072, **GEMMA3 | {"head_dim": 256} | more)
    )


def ministral3(hidden: int, inner: int, layers: int, **more: Any) -> dict[str, Any]:
    text = dense("", hidden, inner, layers, 32, 8, 131072, 262144, **HEADS_OF_128, **YARN, **more)
    return seeing("Mistral3", text | {"model_type": "ministral3"})


def lfm2(hidden: int, inner: int, layers: int, heads: int, attending: list[int]) -> dict[str, Any]:
    """inner: the actual width, not the larger value in LFM2's own files."""
    return {
        **dense("Lfm2", hidden, inner, layers, heads, 8, 65536, 128_000),
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": attending,
        "tie_word_embeddings": True,
    }


def bert(hidden: int, layers: int, heads: int, family: str = "Bert", **more: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}Model"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        **more,
    }


QWEN3_5_35B = seeing(
    "Qwen3_5Moe",
    dense("", 2048, 512, 40, 16, 2, 248320, 262144, head_dim=256, num_experts=256, moe_intermediate_size=512),
)
QWEN3_5_27B = qwen3_5(5120, 17408, 64, 24, 4, 48)
SIXTEEN_LAYERS = [2, 5, 8, 10, 12, 14]

OTHERS: dict[str, dict[str, Any]] = {
    # [l] llama3.1 and 3.2 have a vocabulary of 128000 and 256 more
    "Llama-3.1-8B-Instruct": dense("Llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.1-70B-Instruct": dense("Llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "Llama-3.3-70B-Instruct": dense("Llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "Llama-3.2-3B-Instruct": dense("Llama", 3072, 8192, 28, 24, 8, 128256, 131072, **TIED),
    "TinyLlama-1.1B-Chat-v1.0": dense("Llama", 2048, 5632, 22, 32, 4, 32000, 2048),
    "SmolLM2-135M-Instruct": dense("Llama", 576, 1536, 30, 9, 3, 49152, 8192, **TIED),
    "SmolLM2-360M-Instruct": dense("Llama", 960, 2560, 32, 15, 5, 49152, 8192, **TIED),
    "SmolLM2-1.7B-Instruct": dense("Llama", 2048, 8192, 24, 32, 32, 49152, 8192, **TIED),
    "DeepSeek-R1-Distill-Llama-8B": dense("Llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "DeepSeek-R1-Distill-Llama-70B": dense("Llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    # [d] the table of a converter of Falcon 3
    "Falcon3-1B-Instruct": dense("Llama", 2048, 8192, 18, 8, 4, 131072, 8192, head_dim=256),
    "Falcon3-3B-Instruct": dense("Llama", 3072, 9216, 22, 12, 4, 131072, 32768, head_dim=256),
    "Falcon3-7B-Instruct": dense("Llama", 3072, 23040, 28, 12, 4, 131072, 32768, head_dim=256),
    # [l]
    "Mistral-7B-Instruct-v0.3": dense("Mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "Mistral-Small-24B": dense(
        "Mistral", 5120, 32768, 40, 32, 8, 131072, 131072, sliding_window=None, head_dim=128
    ),
    # [d] the whole file of its base model
    "Mistral-Nemo-Instruct-2407": dense(
        "Mistral", 5120, 14336, 40, 32, 8, 131072, 128000, sliding_window=None, head_dim=128
    ),
    # [d] 3B, [t] 8B; 14B as its model card counts it (13.5B)
    "Ministral-3-3B-Instruct-2512": ministral3(3072, 9216, 26, **TIED),
    "Ministral-3-8B-Instruct-2512": ministral3(4096, 14336, 34),
    "Ministral-3-14B-Instruct-2512": ministral3(5120, 16384, 40),
    # [l]; the contexts are those of [k], and of xorbitsai/inference for DeepSeek
    "Qwen2.5-1.5B-Instruct": dense("Qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, **TIED),
    "Qwen2.5-3B-Instruct": dense("Qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, **TIED),
    "Qwen2.5-7B-Instruct": dense("Qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen2.5-14B-Instruct": dense("Qwen2", 5120, 13824, 48, 40, 8, 152064, 32768),
    "Qwen2.5-32B-Instruct": dense("Qwen2", 5120, 27648, 64, 40, 8, 152064, 32768),
    "Qwen2.5-72B-Instruct": dense("Qwen2", 8192, 29568, 80, 64, 8, 152064, 32768),
    "Qwen2.5-Coder-1.5B-Instruct": dense("Qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, **TIED),
    "Qwen2.5-Coder-7B-Instruct": dense("Qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen2.5-Coder-14B-Instruct": dense("Qwen2", 5120, 13824, 48, 40, 8, 152064, 32768),
    "Qwen2.5-Coder-32B-Instruct": dense("Qwen2", 5120, 27648, 64, 40, 8, 152064, 32768),
    "QwQ-32B": dense("Qwen2", 5120, 27648, 64, 40, 8, 152064, 40960),
    "DeepSeek-R1-Distill-Qwen-1.5B": dense("Qwen2", 1536, 8960, 28, 12, 2, 151936, 131072),
    "DeepSeek-R1-Distill-Qwen-7B": dense("Qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "DeepSeek-R1-Distill-Qwen-14B": dense("Qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
    "DeepSeek-R1-Distill-Qwen-32B": dense("Qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    # [l], [k]
    "Qwen3-1.7B": dense("Qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, **HEADS_OF_128, **TIED),
    "Qwen3-4B": dense("Qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, **HEADS_OF_128, **TIED),
    "Qwen3-4B-Instruct-2507": dense("Qwen3", 2560, 9728, 36, 32, 8, 151936, 262144, **HEADS_OF_128, **TIED),
    "Qwen3-4B-Thinking-2507": dense("Qwen3", 2560, 9728, 36, 32, 8, 151936, 262144, **HEADS_OF_128, **TIED),
    "Qwen3-8B": dense("Qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, **HEADS_OF_128),
    "DeepSeek-R1-0528-Qwen3-8B": dense("Qwen3", 4096, 12288, 36, 32, 8, 151936, 131072, **HEADS_OF_128),
    "Qwen3-14B": dense("Qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, **HEADS_OF_128),
    "Qwen3-32B": dense("Qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, **HEADS_OF_128),
    "Qwen3-30B-A3B-Instruct-2507": dense("Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, 262144, **EXPERTS_OF_QWEN3),
    "Qwen3-30B-A3B-Thinking-2507": dense("Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, 262144, **EXPERTS_OF_QWEN3),
    "Qwen3-Coder-30B-A3B-Instruct": dense("Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, 262144, **EXPERTS_OF_QWEN3),
    # [t], whose defaults it is
    "Qwen3-Next-80B-A3B-Instruct": dense("Qwen3Next", 2048, 5632, 48, 16, 2, 151936, 262144, head_dim=256),
    # [k]; widths [d] for 0.8B, 2B, 4B and 27B, [t] for 9B
    "Qwen3.5-0.8B": qwen3_5(1024, 3584, 24, 8, 2, 16, **TIED),
    "Qwen3.5-2B": qwen3_5(2048, 6144, 24, 8, 2, 16, **TIED),
    "Qwen3.5-4B": qwen3_5(2560, 9216, 32, 16, 4, 32, **TIED),
    "Qwen3.5-9B": qwen3_5(4096, 12288, 32, 16, 4, 32),
    "Qwen3.5-27B": QWEN3_5_27B,
    "Qwen3.6-27B": QWEN3_5_27B,
    "Qwen3.8-27B": QWEN3_5_27B,
    # [k], [t]
    "Qwen3.5-35B-A3B": QWEN3_5_35B,
    "Qwen3.6-35B-A3B": QWEN3_5_35B,
    # [l]
    "gemma-2-9b-it": dense("Gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, **GEMMA2),
    "gemma-2-27b-it": dense("Gemma2", 4608, 36864, 46, 32, 16, 256000, 8192, **GEMMA2 | HEADS_OF_128),
    # [d], as its model card counts it (268M)
    "gemma-3-270m-it": dense("Gemma3", 640, 2048, 18, 4, 1, 262144, 32768, **GEMMA3),
    # [l]; the vocabulary is that of [t]
    "gemma-3-4b-it": gemma3(2560, 10240, 34, 8, 4),
    "gemma-3-12b-it": gemma3(3840, 15360, 48, 16, 8),
    "gemma-3-27b-it": gemma3(5376, 21504, 62, 32, 16, head_dim=128),
    # [o], [k]
    "gemma-4-E4B-it": seeing(
        "Gemma4", dense("", 2560, 10240, 42, 8, 2, 262144, 131072, **TIED, num_kv_shared_layers=18)
    ),
    # [l], where Phi-3.5 has no more than its short context
    "Phi-3.5-mini-instruct": dense("Phi3", 3072, 8192, 32, 32, 32, 32064, 131072),
    "phi-4": dense("Phi3", 5120, 17920, 40, 40, 10, 100352, 16384),
    "Phi-4-reasoning": dense("Phi3", 5120, 17920, 40, 40, 10, 100352, 32768),
    "Phi-4-mini-instruct": dense("Phi3", 3072, 8192, 32, 24, 8, 200064, 131072, **TIED),
    # [t], whose defaults it is
    "gpt-oss-120b": dense(
        "GptOss", 2880, 2880, 36, 64, 8, 201088, 131072, head_dim=64, num_local_experts=128, num_experts_per_tok=4
    ),
    # [l] OLMo 2; [d] OLMo 3, with the vocabulary of OLMo 2
    "OLMo-2-1124-13B-Instruct": dense("Olmo2", 5120, 13824, 40, 40, 40, 100352, 4096),
    "Olmo-3-7B-Instruct": dense("Olmo3", 4096, 11008, 32, 32, 32, 100278, 65536, sliding_window=4096),
    "Olmo-3-32B-Think": dense("Olmo3", 5120, 27648, 64, 40, 8, 100278, 65536, sliding_window=4096),
    # [d]
    "granite-3.3-2b-instruct": dense("Granite", 2048, 8192, 40, 32, 8, 49159, 131072, **GRANITE),
    "granite-3.3-8b-instruct": dense("Granite", 4096, 12800, 40, 32, 8, 49159, 131072, **GRANITE),
    # the sizes of 3.3 with another vocabulary, untied, are the 8.79 billion parameters that its model card states
    "granite-4.1-8b": dense(
        "Granite", 4096, 12800, 40, 32, 8, 100352, 131072, **GRANITE | {"tie_word_embeddings": False}
    ),
    # [d] a comparison of the files of all GLM-4-0414
    "GLM-4-9B-0414": dense("Glm4", 4096, 13696, 40, 32, 2, 151552, 32768, head_dim=128, attention_bias=True),
    "GLM-4-32B-0414": dense("Glm4", 6144, 23040, 61, 48, 2, 151552, 32768, head_dim=128, attention_bias=False),
    # [k]; the widths make it the 8.03 billion parameters that its model card states
    "c4ai-command-r7b-12-2024": dense(
        "Cohere2", 4096, 14336, 32, 32, 8, 256000, 132096, **TIED, sliding_window=4096
    ),
    # [d] one table made of all files of LFM2
    "LFM2-700M": lfm2(1536, 6912, 16, 24, SIXTEEN_LAYERS),
    "LFM2-2.6B": lfm2(2048, 10752, 30, 32, [2, 5, 9, 13, 17, 21, 24, 27]),
    "LFM2-8B-A1B": dense("Lfm2Moe", 2048, 7168, 24, 32, 8, 65536, 128_000, **TIED)
    | {"full_attn_idxs": [2, 6, 10, 14, 18, 21], "num_experts": 32, "num_experts_per_tok": 4},
}

OTHERS |= {
    # [d] configurations as their repositories have them; encoders by the sizes of BERT's editions
    "llama-2-7b-chat": dense("Llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "CodeLlama-7b-Instruct-hf": dense("Llama", 4096, 11008, 32, 32, 32, 32016, 16384),
    "Mistral-Small-24B-Instruct-2501": dense(
        "Mistral", 5120, 32768, 40, 32, 8, 131072, 32768, sliding_window=None, head_dim=128
    ),
    "Llama-3-8B-Instruct": dense("Llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "Dolphin3.0-Llama3.1-8B": dense("Llama", 4096, 14336, 32, 32, 8, 128258, 131072),
    "deepseek-coder-1.3b-instruct": dense("Llama", 2048, 5504, 24, 16, 16, 32256, 16384),
    "deepseek-coder-6.7b-instruct": dense("Llama", 4096, 11008, 32, 32, 32, 32256, 16384),
    "Falcon3-10B-Instruct": dense("Llama", 3072, 23040, 40, 12, 4, 131072, 32768, head_dim=256),
    "Qwen1.5-4B-Chat": dense("Qwen2", 2560, 6912, 40, 20, 20, 151936, 32768),
    "Qwen2-0.5B-Instruct": dense("Qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **TIED),
    "Qwen2-1.5B-Instruct": dense("Qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, **TIED),
    "Qwen2-7B-Instruct": dense("Qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen2.5-Coder-0.5B-Instruct": dense("Qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **TIED),
    "Qwen2.5-Coder-3B-Instruct": dense("Qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, **TIED),
    "Phi-3-medium-128k-instruct": dense("Phi3", 5120, 17920, 40, 40, 10, 32064, 131072),
    "Qwen3-Embedding-0.6B": dense("Qwen3", 1024, 3072, 28, 16, 8, 151669, 32768, **HEADS_OF_128, **TIED),
    "Qwen3-Embedding-4B": dense("Qwen3", 2560, 9728, 36, 32, 8, 151665, 40960, **HEADS_OF_128, **TIED),
    "Qwen3-Embedding-8B": dense("Qwen3", 4096, 12288, 36, 32, 8, 151665, 40960, **HEADS_OF_128, **TIED),
    "all-MiniLM-L6-v2": bert(384, 6, 12),
    "all-MiniLM-L12-v2": bert(384, 12, 12),
    "snowflake-arctic-embed-m": bert(768, 12, 12),
    "mxbai-embed-large-v1": bert(1024, 24, 16),
    "bge-m3": bert(1024, 24, 16, "XLMRoberta", vocab_size=250002, max_position_embeddings=8194, type_vocab_size=1),
    "nomic-embed-text-v1.5": bert(768, 12, 12, "NomicBert", vocab_size=30528, max_position_embeddings=8192),
}

ALIKE = {  # repositories whose model is of the same sizes as another one's
    "OLMo-2-1124-7B-Instruct": "OLMo-2-1124-7B",
    "Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B-v0.1",
    "DeepSeek-Coder-V2-Lite-Instruct": "DeepSeek-V2-Lite",
    "LFM2.5-1.2B-Instruct": "LFM2-1.2B",
    "Phi-3-mini-128k-instruct": "Phi-3.5-mini-instruct",
    "Phi-4-mini-reasoning": "Phi-4-mini-instruct",
    "Olmo-3-7B-Think": "Olmo-3-7B-Instruct",
    "gpt-oss-safeguard-20b": "gpt-oss-20b",
    "Qwen3-Next-80B-A3B-Thinking": "Qwen3-Next-80B-A3B-Instruct",
    "Qwen3-Coder-Next": "Qwen3-Next-80B-A3B-Instruct",
    "snowflake-arctic-embed-xs": "all-MiniLM-L6-v2",
    "snowflake-arctic-embed-s": "all-MiniLM-L12-v2",
    "snowflake-arctic-embed-l": "mxbai-embed-large-v1",
    "snowflake-arctic-embed-l-v2.0": "bge-m3",
    "gemma-4-E2B-it": "gemma-4-E2B",
    "gemma-4-26B-A4B-it": "gemma-4-26B-A4B",
    "gemma-4-31B-it": "gemma-4-31B",
}
COUNTED = {name: config for name, (_, config) in PUBLISHED.items()}
COUNTED |= {name: config for name, (_, _, config) in IN_BILLIONS.items()} | OTHERS
REAL_CONFIGS = COUNTED | {name: COUNTED[other] for name, other in ALIKE.items()}
"""By the repository's name without its owner."""
