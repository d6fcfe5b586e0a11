"""Transformations of llama.cpp's converter for recurrent and convolutional layers, used by `tests.gguf_writer`."""

from typing import Any

import torch
from torch import Tensor

SIGMOID = 2


def hybrid_keys(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    kinds = config.get("layer_types")
    if architecture.startswith("LFM2"):
        heads = config["num_key_value_heads"]
        keys = {
            "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "shortconv.l_cache": config["conv_L_cache"],
        }
        if architecture == "LFM2MOE":
            dense = config["num_dense_layers"]
            return keys | {"leading_dense_block_count": dense, "expert_gating_func": SIGMOID}
        return keys | {"feed_forward_length": lfm2_width(config)}
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def lfm2_width(config: dict[str, Any]) -> int:
    width = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    multiple = config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple


def hybrid_tensors(tensors: dict[str, Tensor], architecture: str, config: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if architecture.startswith("LFM2"):
            found[name.replace("expert_bias", "expert_bias.bias")] = (
                tensor.squeeze(1) if ".conv.conv." in name else tensor
            )
        elif name.endswith("norm.weight") and ".linear_attn." not in name:
            found[name] = tensor + 1
        elif ".linear_attn." not in name:
            found[name] = tensor
        elif name.endswith("in_proj_qkvz.weight"):
            layer = name.split(".")[2]
            found[f"blk.{layer}.attn_qkv.weight"], found[f"blk.{layer}.attn_gate.weight"] = apart(tensor, config)
        else:
            part = name.split(".linear_attn.")[1]
            if architecture != "QWEN3NEXT":
                tensor = tiled(part, tensor, config)
            found |= named(name, part, tensor)
    return found


def named(name: str, part: str, tensor: Tensor) -> dict[str, Tensor]:
    match part:
        case "A_log":
            return {name: -tensor.exp()}
        case "dt_bias":
            return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}
        case "conv1d.weight":
            return {name: tensor.squeeze(1)}
    return {name: tensor}


def apart(tensor: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Convert rows by key head and type to q, k and v of all heads, and z."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, wide = config["linear_key_head_dim"], values // keys * config["linear_value_head_dim"]
    kinds = tensor.unflatten(0, (keys, -1)).split((size, size, wide, wide), 1)
    q, k, v, z = (kind.flatten(0, 1) for kind in kinds)
    return torch.cat((q, k, v)), z


def tiled(part: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Reorder value heads by key head: the first of each key head, then the second of each, ..."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    count = values * config["linear_value_head_dim"]  # of what belongs to value heads, at the end

    def turned(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

    match part.removesuffix(".weight"):
        case "in_proj_qkv" | "conv1d":
            return torch.cat((tensor[:-count], turned(tensor[-count:])))
        case "in_proj_z" | "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return turned(tensor)
        case "out_proj":
            return turned(tensor.T).T
    return tensor
