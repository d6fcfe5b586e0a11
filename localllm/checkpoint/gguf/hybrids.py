"""`config.json` of the architectures with several types of layers: recurrent, convolutional, latent, shared KV."""

from localllm.checkpoint.gguf.fields import GGUFFields
from localllm.checkpoint.gguf.parts import (
    Config,
    attention,
    dense,
    experts,
    head_size,
    layer_count,
    layer_types,
    rope,
    rope_by_kind,
    routed_and_shared,
)
from localllm.errors import DamagedModel, UnsupportedModel

TILED = {"linear_value_heads_tiled": True}  # the order that llama.cpp's broadcasting needs
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
UNROTATED = 1e29  # a frequency with at least this divisor is not rotated


def qwen3next(gguf: GGUFFields) -> Config:
    return delta_net(gguf) | shared_experts(gguf) | {"architectures": ["Qwen3NextForCausalLM"]}


def qwen35(gguf: GGUFFields) -> Config:
    return dense(gguf) | delta_net(gguf) | TILED | {"architectures": ["Qwen3_5ForCausalLM"]}


def qwen35moe(gguf: GGUFFields) -> Config:
    return delta_net(gguf) | shared_experts(gguf) | TILED | {"architectures": ["Qwen3_5MoeForCausalLM"]}


def delta_net(gguf: GGUFFields) -> Config:
    """Return attention in some layers and a gated delta net in the others: by the file, or in three of four."""
    layers = layer_count(gguf)
    recurrent = gguf.flags("attention.recurrent_layers", layers)
    if recurrent is None:
        every = gguf.size("full_attention_interval", 4)
        recurrent = [(i + 1) % every != 0 for i in range(layers)]
    value_heads, inner = gguf.size("ssm.time_step_rank"), gguf.size("ssm.inner_size")
    return attention(gguf) | {
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent],
        "linear_conv_kernel_dim": gguf.size("ssm.conv_kernel"),
        "linear_key_head_dim": gguf.size("ssm.state_size"),
        "linear_num_key_heads": gguf.size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "attention_bias": False,
    }


def shared_experts(gguf: GGUFFields) -> Config:
    return experts(gguf) | {
        "shared_expert_intermediate_size": gguf.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def lfm2(gguf: GGUFFields) -> Config:
    """LFM2, where layers without key-value heads are convolutions."""
    kv_heads = gguf.sizes("attention.head_count_kv", layer_count(gguf))
    if gguf.count("attention.sliding_window", 0):
        raise UnsupportedModel(
            "LFM2 with sliding windows is not supported", "use one of the published text models"
        )
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "num_key_value_heads": max(kv_heads) or None,
        "intermediate_size": gguf.size("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # the file's length is already adjusted
        "norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": gguf.size("shortconv.l_cache"),
        "conv_bias": False,
    }


def lfm2moe(gguf: GGUFFields) -> Config:
    if gguf.count("expert_gating_func") != SIGMOID:
        raise UnsupportedModel(
            "LFM2 with a router other than sigmoid is not supported", "use one of the published models"
        )
    return (
        lfm2(gguf)
        | experts(gguf)
        | {
            "architectures": ["Lfm2MoeForCausalLM"],
            "num_dense_layers": gguf.count("leading_dense_block_count", 0),
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        }
    )


def deepseek2(gguf: GGUFFields) -> Config:
    """Latent attention.

    The converter also writes the sizes of attention with one key-value head, which are not used.
    """
    if not gguf.count("expert_count", 0):
        raise UnsupportedModel("latent attention without experts is not supported", "use a DeepSeek or GLM model")
    rope_dim = gguf.size("rope.dimension_count")
    # Files from before the split of attn_kv_b have the sizes of entire heads under the keys without suffix.
    key = gguf.size("attention.key_length_mla", None) or gguf.size("attention.key_length")
    if key <= rope_dim:
        raise DamagedModel(f"heads of {key} dimensions cannot rotate {rope_dim} of them", "fetch the model again")
    router: Config = {"architectures": ["DeepseekV3ForCausalLM"]}
    # Early files do not specify the router; a selection bias was introduced with the sigmoid.
    corrected = any(name.endswith(".exp_probs_b.bias") for name in gguf.header.tensors)
    softmax = gguf.count("expert_gating_func", SIGMOID if corrected else SOFTMAX) != SIGMOID
    if gguf.number("attention.temperature_scale", None) or (softmax and gguf.flag("expert_weights_norm", False)):
        raise UnsupportedModel("Mistral Large 3 is not supported", "use a DeepSeek or GLM model")
    if softmax:
        limited = gguf.size("expert_group_count", 1) > 1
        method = "group_limited_greedy" if limited else "greedy"
        router = {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}
    ropes = rope(gguf)
    ropes.pop("partial_rotary_factor", None)
    if "mscale_all_dim" in ropes:  # the converter stores a tenth of it
        ropes["mscale_all_dim"] *= 10
        ropes["mscale"] = ropes["mscale_all_dim"]
    return dense(gguf) | {
        **router,
        "num_key_value_heads": gguf.size("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": gguf.size("attention.q_lora_rank", None),
        "kv_lora_rank": gguf.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": gguf.size("attention.value_length_mla", None) or gguf.size("attention.value_length"),
        **routed_and_shared(gguf),
        "rope_interleave": True,
        "rope_parameters": ropes,
    }


def gemma4(gguf: GGUFFields) -> Config:
    """Gemma 4, whose full-attention layers have another head size, and whose last layers may lack keys and
    values.
    """
    layers = layer_count(gguf)
    types = layer_types(gguf, 6)
    widths = gguf.sizes("feed_forward_length", layers)
    shared = gguf.count("attention.shared_kv_layers", 0)
    own_full = [
        i for i, layer_type in enumerate(types[: max(layers - shared, 0)]) if layer_type == "full_attention"
    ]
    table = gguf.header.tensors.get("per_layer_token_embd.weight")
    config: Config = {
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": types,
        "head_dim": gguf.size("attention.key_length_swa"),
        "global_head_dim": head_size(gguf),
        **gemma4_kv_heads(gguf, types),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": gguf.count("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        "attention_k_eq_v": not all(gguf.has_tensor(f"blk.{i}.attn_v.weight") for i in own_full),
        "sliding_window": gguf.size("attention.sliding_window"),
        # llama.cpp assumes 30 for a missing key; its converter omits it where config.json has none.
        "final_logit_softcapping": gguf.number("final_logit_softcapping", None),
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": False,
        "rope_parameters": gemma4_ropes(gguf),
    }
    if gguf.count("expert_count", 0):
        config |= experts(gguf) | {"enable_moe_block": True}
        config["top_k_experts"] = config.pop("num_experts_per_tok")
    return config


def gemma4_kv_heads(gguf: GGUFFields, types: list[str]) -> Config:
    heads = gguf.sizes("attention.head_count_kv", len(types))
    by_type = {
        layer_type: {h for h, of_layer in zip(heads, types, strict=True) if of_layer == layer_type}
        for layer_type in set(types)
    }
    if any(len(counts) > 1 for counts in by_type.values()):
        raise UnsupportedModel("layers of one type differ in key-value heads", "use one of the published models")
    full = by_type.get("full_attention", {heads[0]})
    sliding = by_type.get("sliding_attention", full)
    return {"num_key_value_heads": min(sliding), "num_global_key_value_heads": min(full)}


def gemma4_ropes(gguf: GGUFFields) -> Config:
    """Return the ropes. Full-attention layers rotate only the first pairs, with divisor 1; the rest have 1e30."""
    divisors, size = gguf.read_factors("rope_freqs.weight") or [1.0], gguf.size("attention.key_length_swa")
    rotated = divisors.count(1.0)
    if (
        any(divisor < UNROTATED for divisor in divisors[rotated:])
        or gguf.size("rope.dimension_count_swa", size) != size
    ):
        raise UnsupportedModel(
            "Gemma 4 with other rotary embeddings is not supported", "use one of the published models"
        )
    share = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}
    ropes = rope_by_kind(gguf, 10000.0)
    return ropes | {"full_attention": {"rope_theta": ropes["full_attention"]["rope_theta"], **share}}
