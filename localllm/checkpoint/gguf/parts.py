"""Parts of `config.json` that most GGUF architectures share: sizes, rope, windows, experts.

Missing keys have the defaults of llama.cpp, the format's reference. What only the presence or the shape of a
tensor indicates (tied head, biases, vocabulary size) is read from the tensors.
"""

import math
from typing import Any

from localllm.arch.parts import MAX_LAYERS
from localllm.checkpoint.gguf.fields import GGUFFields
from localllm.errors import DamagedModel, UnsupportedModel

Config = dict[str, Any]


def shared_config(gguf: GGUFFields) -> Config:
    embedding = gguf.header.tensors.get("token_embd.weight")
    if not gguf.header.tensors:
        raise UnsupportedModel(
            f"{gguf.header.files[0]} contains a vocabulary but no weights", "only `localllm template` can use it"
        )
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedModel(f"{gguf.header.files[0]} contains no token embedding", "fetch the model again")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": gguf.size("embedding_length"),
        "num_hidden_layers": layer_count(gguf),
        "num_attention_heads": gguf.size("attention.head_count"),
        "head_dim": head_size(gguf),
        "max_position_embeddings": gguf.size("context_length"),
        "tie_word_embeddings": not gguf.has_tensor("output.weight"),
        "rope_parameters": rope(gguf),
    }


def dense(gguf: GGUFFields) -> Config:
    """Return attention and an MLP for every layer."""
    return attention(gguf) | {
        "intermediate_size": gguf.size("feed_forward_length"),
        "mlp_bias": gguf.has_tensor("blk.0.ffn_up.bias"),
    }


def attention(gguf: GGUFFields) -> Config:
    return {
        "num_key_value_heads": gguf.size("attention.head_count_kv", None) or gguf.size("attention.head_count"),
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": gguf.has_tensor("blk.0.attn_q.bias") or gguf.has_tensor("blk.0.attn_qkv.bias"),
    }


def layer_count(gguf: GGUFFields) -> int:
    """Return the number of layers without those for multi-token prediction."""
    layers = gguf.size("block_count") - gguf.count("nextn_predict_layers", 0)
    if not 0 < layers <= MAX_LAYERS:
        raise DamagedModel(f"{gguf.header.files[0]} specifies {layers} layers", "fetch the model again")
    return layers


def head_size(gguf: GGUFFields) -> int:
    width, heads = gguf.size("embedding_length"), gguf.size("attention.head_count")
    size = gguf.size("attention.key_length", width // heads)
    if not size:
        raise DamagedModel(
            f"{gguf.header.files[0]} has {heads} heads in {width} dimensions", "fetch the model again"
        )
    return size


def rope(gguf: GGUFFields) -> Config:
    config: Config = {"rope_theta": gguf.number("rope.freq_base", 10000.0)}
    rotary_dim = gguf.size("rope.dimension_count", None)
    if rotary_dim is not None and rotary_dim != head_size(gguf):
        config["partial_rotary_factor"] = rotary_dim / head_size(gguf)
    if short := gguf.read_factors("rope_factors_short.weight"):
        return config | longrope(gguf, short)
    if divisors := gguf.read_factors("rope_freqs.weight"):
        return config | {"rope_type": "divided", "divisors": divisors}
    scaling_type = gguf.text("rope.scaling.type", "linear")
    factor = gguf.number("rope.scaling.factor", gguf.number("rope.scale_linear", 1.0))
    match scaling_type:
        case "none":
            return config
        case "linear":
            return config | ({"rope_type": "linear", "factor": factor} if factor != 1.0 else {})
        case "yarn":
            return config | yarn(gguf, factor)
    raise UnsupportedModel(f"the rope scaling {scaling_type!r} is not supported", "linear, yarn and longrope are")


def yarn(gguf: GGUFFields, factor: float) -> Config:
    config: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original_context(gguf),
        "beta_fast": gguf.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": gguf.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if all_dims := gguf.number("rope.scaling.yarn_log_multiplier", None):
        return config | {"mscale": 1.0, "mscale_all_dim": all_dims}
    if (attention_factor := gguf.number("rope.scaling.yarn_attn_factor", None)) is not None:
        return config | {"attention_factor": attention_factor}
    if (extra_factor := gguf.number("rope.scaling.attn_factor", None)) is not None:
        return config | {"attention_factor": extra_factor * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)}
    return config


def longrope(gguf: GGUFFields, short: list[float]) -> Config:
    config: Config = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": gguf.read_factors("rope_factors_long.weight"),
        "original_max_position_embeddings": original_context(gguf),
    }
    magnitude = gguf.number("rope.scaling.attn_factor", None)
    return config if magnitude is None else config | {"attention_factor": magnitude}


def original_context(gguf: GGUFFields) -> int:
    return gguf.size("rope.scaling.original_context_length", None) or gguf.size("context_length")


def rope_by_kind(gguf: GGUFFields, sliding_theta: float) -> Config:
    """Return the ropes: layers with a window have an unscaled one."""
    sliding = {"rope_theta": gguf.number("rope.freq_base_swa", sliding_theta), "rope_type": "default"}
    return {"full_attention": rope(gguf), "sliding_attention": sliding}


def layer_types(gguf: GGUFFields, every: int) -> list[str]:
    """Return layer types by the file's pattern: one entry per layer, or full attention in each `every`th layer."""
    layers, key = layer_count(gguf), "attention.sliding_window_pattern"
    is_sliding = gguf.flags(key, layers)
    if is_sliding is None:
        every = gguf.count(key, every)
        is_sliding = [every == 0 or i % every < every - 1 for i in range(layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]


def experts(gguf: GGUFFields) -> Config:
    used = gguf.size("expert_used_count")
    return {
        "num_experts": gguf.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": gguf.size("expert_feed_forward_length", None)
        or gguf.size("feed_forward_length") // used,
    }


def routed_and_shared(gguf: GGUFFields) -> Config:
    """Return DeepSeek-V3's experts: the first layers have none, the others also have shared experts."""
    return {
        "first_k_dense_replace": gguf.count("leading_dense_block_count", 0),
        "n_routed_experts": gguf.size("expert_count"),
        "num_experts_per_tok": gguf.size("expert_used_count"),
        "n_shared_experts": gguf.count("expert_shared_count"),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "norm_topk_prob": gguf.flag("expert_weights_norm", False),
        "n_group": gguf.size("expert_group_count", 1),
        "topk_group": gguf.size("expert_group_used_count", 1),
    }
