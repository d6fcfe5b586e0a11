"""Translates GGUF's tensor names to the runtime's (localllm/arch/layout.py), and undoes its converter's
reordering.

There is one table for all architectures, with overrides where an architecture uses a name differently. Source:
`gguf-py/gguf/constants.py` and `conversion/*.py` of llama.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")  # files from before experts were stacked

# Parsed into config.json: divisors of the rope frequencies.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

BERT_NAMES = {
    "position_embd.weight": "embed_positions.weight",
    "token_types.weight": "embed_kinds.weight",
    "token_embd_norm.weight": "embed_norm.weight",
    "token_embd_norm.bias": "embed_norm.bias",
}
GLOBAL_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "token_embd_norm.weight": "norm.weight",  # LFM2's name for it
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}
GLOBAL_OVERRIDES = {
    "bert": BERT_NAMES,
    "nomic-bert": BERT_NAMES,
    "gemma-embedding": {"dense_2.weight": "dense.0.weight", "dense_3.weight": "dense.1.weight"},
}
LAYER_NAMES = {
    "attn_norm": "before_mixer",
    "post_attention_norm": "after_mixer",
    "attn_output_norm": "after_mixer",
    "layer_output_norm": "after_ffn",
    "ffn_norm": "before_ffn",
    "post_ffw_norm": "after_ffn",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj",
    "attn_kv_a_norm": "self_attn.kv_a_norm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared.gate_proj",
    "ffn_up_shexp": "mlp.shared.up_proj",
    "ffn_down_shexp": "mlp.shared.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
FULL_LAYER_NAMES = {  # entire names, where the runtime's suffix differs
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.correction_bias",
    "ssm_a": "linear_attn.A",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "mlp.before_router.weight",
    "ffn_down_exps.scale": "mlp.expert_scale",
}
# The norm after attention is the one before the MLP, as there is no other.
PRE_MLP_NORM = {"post_attention_norm": "before_ffn"}
# Gate and up are one matrix, gate first.
FUSED_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
# With experts, the MLP and the norms of the layer belong to the shared expert.
GEMMA4_EXPERT_NAMES = {
    "ffn_norm": "mlp.before_shared",
    "ffn_gate": "mlp.shared.gate_proj",
    "ffn_up": "mlp.shared.up_proj",
    "ffn_down": "mlp.shared.down_proj",
    "post_ffw_norm_1": "mlp.after_shared",
    "pre_ffw_norm_2": "mlp.before_experts",
    "post_ffw_norm_2": "mlp.after_experts",
}
LAYER_OVERRIDES = {
    "gpt-oss": PRE_MLP_NORM,
    "qwen3next": PRE_MLP_NORM,
    "qwen35": PRE_MLP_NORM,
    "qwen35moe": PRE_MLP_NORM,
    "glm4moe": PRE_MLP_NORM,
    "phi3": FUSED_GATE_UP,
    "glm4": FUSED_GATE_UP,
}

KV_PREFIXES = ("attn_k.", "attn_v.", "attn_k_norm.")
# Stored without its dimension of size one.
CONVOLUTION = re.compile(r"linear_attn\.conv1d\.weight|conv\.conv\.weight")
PER_HEAD_MATRIX = re.compile(r"self_attn\.[kv]_b_proj\.weight")  # stored [heads, ...]

# Their converter makes the two elements of a rotary pair adjacent rows of q and k.
INTERLEAVED_ROPE = ("llama", "mistral3", "smollm3", "granite")


def runtime_name(name: str, architecture: str, config: Mapping[str, Any]) -> str | None:
    """Return the runtime's name; None if it is not a weight of the model. Unknown names are returned unchanged.

    config: the model's, from `to_config`
    """
    if name in CONFIG_TENSORS:
        return None
    global_names = GLOBAL_NAMES | GLOBAL_OVERRIDES.get(architecture, {})
    if name in global_names:
        return global_names[name]
    block = BLOCK.fullmatch(name)
    if not block:
        return name
    layer, inner = int(block[1]), block[2]
    if layer >= config["num_hidden_layers"]:  # a multi-token prediction layer
        return None
    if inner.startswith(KV_PREFIXES) and layer >= first_shared_layer(config):  # the layer reads another layer's
        return None
    table = LAYER_NAMES | LAYER_OVERRIDES.get(architecture, {})
    if config.get("enable_moe_block"):
        table |= GEMMA4_EXPERT_NAMES
    if layer_type(layer, config) == "linear_attention":
        table |= {"attn_qkv": "linear_attn.in_proj_qkv"}
    return f"layers.{layer}.{layer_tensor_name(inner, table)}"


def first_shared_layer(config: Mapping[str, Any]) -> int:
    """Return the first layer without keys and values of its own."""
    return config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)


def layer_type(layer: int, config: Mapping[str, Any]) -> str | None:
    return config["layer_types"][layer] if "layer_types" in config else None


def layer_tensor_name(name: str, table: Mapping[str, str]) -> str:
    if name in FULL_LAYER_NAMES:
        return FULL_LAYER_NAMES[name]
    if match := ONE_EXPERT.fullmatch(name):
        return f"mlp.experts.{match[2]}.{match[1]}_proj.weight"
    stem, _, suffix = name.rpartition(".")
    return f"{table[stem]}.{suffix}" if stem in table else name


def runtime_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that the runtime expects for the tensor with this runtime name."""
    if CONVOLUTION.search(name) and len(shape) == 2:
        return shape[0], 1, shape[1]
    if PER_HEAD_MATRIX.search(name) and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape


def rotary_heads(name: str, architecture: str, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (number, size) of the heads at the start of this tensor whose rotary pairs are adjacent; otherwise
    None.

    The runtime expects the elements of a pair half a head apart, as for `config.json`. name: the runtime's
    """
    match = re.search(r"self_attn\.(q|k|qkv)_proj\.", name) if architecture in INTERLEAVED_ROPE else None
    if not match:
        return None
    q, k = config["num_attention_heads"], config["num_key_value_heads"]
    return {"q": q, "k": k, "qkv": q + k}[match[1]], config["head_dim"]
