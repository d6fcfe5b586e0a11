"""A GGUF file's metadata as the `config.json` of the same model, so that a family is described once for both.

Sources: llama.cpp's `src/models/*.cpp` (defaults of missing keys) and `conversion/*.py` (what keys are computed
from).
"""

from collections.abc import Callable

from localllm.arch.pooling import POOLING
from localllm.checkpoint.gguf import hybrids
from localllm.checkpoint.gguf.fields import GGUFFields
from localllm.checkpoint.gguf.header import GGUFHeader
from localllm.checkpoint.gguf.names import INTERLEAVED_ROPE
from localllm.checkpoint.gguf.parts import (
    Config,
    attention,
    dense,
    experts,
    head_size,
    layer_count,
    layer_types,
    original_context,
    rope,
    rope_by_kind,
    routed_and_shared,
    shared_config,
)
from localllm.errors import DamagedModel, UnsupportedModel

# `config.json` of GGUF's embedders: BERT, NomicBert and EmbeddingGemma; and the pooling that any file specifies.
#
# Sources: llama.cpp's `src/models/{bert,gemma-embedding}.cpp`, `conversion/bert.py`.

POOLING_TYPES = {1: "mean", 2: "cls", 3: "last"}  # values of `pooling_type`; 0 is unspecified
RANK_POOLING = 4
DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")


def bert(gguf: GGUFFields) -> Config:
    """BERT and RoBERTa, whose converter removes the positions that no token has."""
    return encoder_sizes(gguf) | {
        "architectures": ["BertModel"],
        "max_position_embeddings": row_count(gguf, "position_embd.weight"),
        "hidden_act": "gelu",
    }


def nomic_bert(gguf: GGUFFields) -> Config:
    if gguf.flag("attention.causal", False) or not gguf.has_tensor("blk.0.ffn_gate.weight"):
        raise UnsupportedModel("this version of NomicBert is not supported", "versions 1 and 1.5 are")
    return encoder_sizes(gguf) | {
        "architectures": ["NomicBertModel"],
        "qkv_proj_bias": gguf.has_tensor("blk.0.attn_qkv.bias"),
        "mlp_fc1_bias": gguf.has_tensor("blk.0.ffn_up.bias"),
    }


def encoder_sizes(gguf: GGUFFields) -> Config:
    return {
        "intermediate_size": gguf.size("feed_forward_length"),
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "type_vocab_size": row_count(gguf, "token_types.weight") if gguf.has_tensor("token_types.weight") else 0,
    }


def gemma_embedding(gguf: GGUFFields) -> Config:
    return dense(gguf) | {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": head_size(gguf),
        "sliding_window": gguf.size("attention.sliding_window"),
        "layer_types": layer_types(gguf, 6),
        "rope_parameters": rope_by_kind(gguf, 10000.0),
        "num_hidden_layers": layer_count(gguf),
    }


def row_count(gguf: GGUFFields, tensor: str) -> int:
    entry = gguf.header.tensors.get(tensor)
    if entry is None or len(entry.shape) != 2:
        raise DamagedModel(f"{gguf.header.files[0]} contains no table {tensor}", "fetch the model again")
    return entry.shape[0]


def pooling_config(gguf: GGUFFields) -> Config:
    """Return the pooling for `arch.pooling`; {} if the file specifies none, as in chat models."""
    pooling_type = gguf.count("pooling_type", 0)
    if pooling_type == RANK_POOLING:
        raise UnsupportedModel("a reranking model is not supported", "use an embedding model")
    if pooling_type not in POOLING_TYPES:
        return {}
    return {
        POOLING: {
            "kind": POOLING_TYPES[pooling_type],
            "dense": [dense_layer(gguf, name) for name in DENSE_TENSORS if gguf.has_tensor(name)],
        }
    }


def dense_layer(gguf: GGUFFields, name: str) -> Config:
    columns = gguf.header.tensors[name].shape[-1]
    return {"columns": columns, "rows": row_count(gguf, name), "activation": "identity"}


def to_config(header: GGUFHeader) -> Config:
    """Return the `config.json` of this model.

    Raises UnsupportedModel for an unsupported architecture, and DamagedModel for a missing or invalid key.
    """
    gguf = GGUFFields(header)
    if gguf.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"the GGUF architecture {gguf.architecture!r} is not supported",
            "docs/models.md lists the families that are",
        )
    config = shared_config(gguf) | ARCHITECTURES[gguf.architecture](gguf) | pooling_config(gguf)
    if gguf.architecture in INTERLEAVED_ROPE and "partial_rotary_factor" in config["rope_parameters"]:
        # Their converter permutes entire heads, but llama.cpp rotates the first dimensions: these do not match.
        raise UnsupportedModel(
            f"partial rotary embeddings are not supported in {gguf.architecture} files",
            "use the safetensors version",
        )
    return config


def llama(gguf: GGUFFields) -> Config:
    if not gguf.count("expert_count", 0):
        return dense(gguf) | {"architectures": ["LlamaForCausalLM"]}
    return dense(gguf) | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": gguf.size("expert_count"),
        "num_experts_per_tok": gguf.size("expert_used_count"),
    }


def mistral3(gguf: GGUFFields) -> Config:
    ropes = rope(gguf)
    if (beta := gguf.number("attention.temperature_scale", None)) is not None:
        ropes["llama_4_scaling_beta"] = beta
    return dense(gguf) | {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": ropes}


def qwen2(gguf: GGUFFields) -> Config:
    return dense(gguf) | {"architectures": ["Qwen2ForCausalLM"]}


def qwen3(gguf: GGUFFields) -> Config:
    return dense(gguf) | {"architectures": ["Qwen3ForCausalLM"]}


def qwen3moe(gguf: GGUFFields) -> Config:
    return attention(gguf) | experts(gguf) | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}


def gemma2(gguf: GGUFFields) -> Config:
    large = layer_count(gguf) == 46
    return dense(gguf) | {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": gemma_scalar(gguf, large),
        "sliding_window": gguf.size("attention.sliding_window", 4096),
        "layer_types": layer_types(gguf, 2),
        "attn_logit_softcapping": gguf.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
    }


def gemma_scalar(gguf: GGUFFields, large: bool) -> int:
    """Return the query scaling: the 27B models use hidden size per head, the others the head size."""
    share = gguf.size("embedding_length") // gguf.size("attention.head_count")
    return share if large else head_size(gguf)


def gemma3(gguf: GGUFFields) -> Config:
    layers, window = layer_count(gguf), gguf.count("attention.sliding_window", 0)
    return dense(gguf) | {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": gemma_scalar(gguf, layers == 62),
        "sliding_window": window or None,
        "layer_types": layer_types(gguf, 6) if window else ["full_attention"] * layers,
        "final_logit_softcapping": gguf.number("final_logit_softcapping", None),
        "rope_parameters": rope_by_kind(gguf, 10000.0),
    }


def phi3(gguf: GGUFFields) -> Config:
    return dense(gguf) | {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": gguf.count("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original_context(gguf),
    }


def gpt_oss(gguf: GGUFFields) -> Config:
    ropes = rope(gguf)
    if ropes.get("rope_type") == "yarn":
        ropes["truncate"] = False  # as in the published models; the metadata has no key for it
    return attention(gguf) | {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": gguf.size("expert_count"),
        "num_experts_per_tok": gguf.size("expert_used_count"),
        "intermediate_size": gguf.size("expert_feed_forward_length"),
        "sliding_window": gguf.size("attention.sliding_window"),
        "layer_types": layer_types(gguf, 2),
        "rope_parameters": ropes,
    }


def smollm3(gguf: GGUFFields) -> Config:
    return dense(gguf) | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4}


def olmo2(gguf: GGUFFields) -> Config:
    window = gguf.count("attention.sliding_window", 0)
    if not window:
        return dense(gguf) | {"architectures": ["Olmo2ForCausalLM"]}
    return dense(gguf) | {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": layer_types(gguf, 4),
        "rope_parameters": rope_by_kind(gguf, gguf.number("rope.freq_base", 10000.0)),
    }


def granite(gguf: GGUFFields) -> Config:
    return dense(gguf) | {
        "architectures": ["GraniteForCausalLM"],
        "logits_scaling": gguf.number("logit_scale"),
        "residual_multiplier": gguf.number("residual_scale", 1.0),
        "embedding_multiplier": gguf.number("embedding_scale", 1.0),
        "attention_multiplier": gguf.number("attention.scale", head_size(gguf) ** -0.5),
    }


def glm4(gguf: GGUFFields) -> Config:
    sections = gguf.header.metadata.get("glm4.rope.dimension_sections")
    if sections and any(sections):
        raise UnsupportedModel("GLM-4V, a vision model, is not supported", "use a text-only GLM-4")
    return dense(gguf) | {"architectures": ["Glm4ForCausalLM"]}


def glm4moe(gguf: GGUFFields) -> Config:
    return (
        dense(gguf)
        | routed_and_shared(gguf)
        | {"architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": gguf.has_tensor("blk.0.attn_q_norm.weight")}
    )


def cohere2(gguf: GGUFFields) -> Config:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "intermediate_size": gguf.size("feed_forward_length"),
        "num_key_value_heads": gguf.size("attention.head_count_kv", None) or gguf.size("attention.head_count"),
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "logit_scale": gguf.number("logit_scale"),
        "sliding_window": gguf.size("attention.sliding_window"),
        "layer_types": layer_types(gguf, 4),
    }


def sampling_defaults(header: GGUFHeader) -> Config:
    """Return the `generation_config.json` with the sampling parameters that the file recommends."""
    values = {name: header.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING_KEYS.items()}
    defaults: Config = {name: value for name, value in values.items() if value is not None}
    return {"do_sample": defaults.get("temperature", 1.0) != 0, **defaults} if defaults else {}


SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
ARCHITECTURES: dict[str, Callable[[GGUFFields], Config]] = {
    "llama": llama,
    "mistral3": mistral3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "gpt-oss": gpt_oss,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "granite": granite,
    "glm4": glm4,
    "glm4moe": glm4moe,
    "cohere2": cohere2,
    "gemma4": hybrids.gemma4,
    "qwen3next": hybrids.qwen3next,
    "qwen35": hybrids.qwen35,
    "qwen35moe": hybrids.qwen35moe,
    "lfm2": hybrids.lfm2,
    "lfm2moe": hybrids.lfm2moe,
    "deepseek2": hybrids.deepseek2,
    "bert": bert,
    "nomic-bert": nomic_bert,
    "gemma-embedding": gemma_embedding,
}
