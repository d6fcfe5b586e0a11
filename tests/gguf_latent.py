"""Transformations of llama.cpp's converter for latent attention, used by `tests.gguf_writer`."""

from typing import Any

from torch import Tensor

GATING = {"softmax": 1, "sigmoid": 2}


def latent_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of latent attention: one KV head for the latent, and the sizes of the heads derived from it."""
    rank, turned, ropes = config["kv_lora_rank"], config["qk_rope_head_dim"], config["rope_parameters"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_gating_func": GATING.get(config.get("scoring_func", "")),
        "rope.dimension_count": turned,
        "rope.scaling.yarn_log_multiplier": 0.1 * ropes["mscale_all_dim"] if "mscale_all_dim" in ropes else None,
    }


def latent_tensors(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Split the projections of keys and values from the latent by head; those of keys are transposed."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".kv_b_proj.weight"):
            by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
            k, v = by_head.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
            found[name.replace(".kv_b_proj.", ".k_b_proj.")] = k.transpose(1, 2)
            found[name.replace(".kv_b_proj.", ".v_b_proj.")] = v
        else:
            found[name] = tensor
    return found
