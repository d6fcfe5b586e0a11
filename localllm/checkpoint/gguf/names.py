"""GGUF's tensor names in the vocabulary of the runtime (localllm/arch/layout.py), and what its converter did to
rows.

One table for all architectures; where one of them uses a name for something else, it is listed beside it.
Source: `gguf-py/gguf/constants.py` and `conversion/*.py` of llama.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")  # files of before experts were stacked

# Read into config.json: divisors of the rope frequencies.
IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

OUTER = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "token_embd_norm.weight": "norm.weight",  # LFM2's name for it
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}
INNER = {
    "attn_norm": "before_mixer",
    "post_attention_norm": "after_mixer",
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
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
WHOLE = {  # where the runtime's name has another ending
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.correction_bias",
}
# The norm after attention is the one before the MLP: there is no other.
ONE_NORM = {"post_attention_norm": "before_ffn"}
# Gate and up are one matrix, gate first.
FUSED = {"ffn_up": "mlp.gate_up_proj"}
OTHERWISE = {
    "gpt-oss": ONE_NORM,
    "qwen3next": ONE_NORM,
    "qwen35": ONE_NORM,
    "qwen35moe": ONE_NORM,
    "glm4moe": ONE_NORM,
    "phi3": FUSED,
    "glm4": FUSED,
}

# Their converter puts the two values of a rotary pair side by side in the rows of q and k.
PAIRS_SIDE_BY_SIDE = ("llama", "mistral3", "smollm3", "granite")


def canonical(name: str, architecture: str, layers: int) -> str | None:
    """The runtime's name; None for what is not a weight of the model itself. A name that no table knows stays."""
    if name in IN_CONFIG:
        return None
    if name in OUTER:
        return OUTER[name]
    block = BLOCK.fullmatch(name)
    if not block:
        return name
    layer, inner = int(block[1]), block[2]
    if layer >= layers:  # guesses further tokens
        return None
    return f"layers.{layer}.{inner_name(inner, architecture)}"


def inner_name(name: str, architecture: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    if one := ONE_EXPERT.fullmatch(name):
        return f"mlp.experts.{one[2]}.{one[1]}_proj.weight"
    stem, _, kind = name.rpartition(".")
    table = INNER | OTHERWISE.get(architecture, {})
    return f"{table[stem]}.{kind}" if stem in table else name


def rotary_heads(name: str, architecture: str, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many heads of which size begin this tensor (by the runtime's name) with their rotary pairs side by side.

    The runtime wants the pairs half a head apart, as in `config.json`'s world.
    """
    found = re.search(r"self_attn\.(q|k|qkv)_proj\.", name) if architecture in PAIRS_SIDE_BY_SIDE else None
    if not found:
        return None
    q, k = config["num_attention_heads"], config["num_key_value_heads"]
    return {"q": q, "k": k, "qkv": q + k}[found[1]], config["head_dim"]
