"""Transformations of llama.cpp's converter for Gemma 4, used by `tests.gguf_writer`."""

from typing import Any

import torch
from torch import Tensor

UNTURNED = 1e30  # a divisor that leaves no frequency


def gemma4_keys(config: dict[str, Any]) -> dict[str, Any]:
    kinds, layers, own = config["layer_types"], config["num_hidden_layers"], full_layers(config)
    first_shared = layers - config["num_kv_shared_layers"]
    keys = {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "attention.key_length": own["head_dim"],
        "attention.value_length": own["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": own["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }
    if config["use_double_wide_mlp"]:
        width = config["intermediate_size"]
        keys["feed_forward_length"] = [width if i < first_shared else 2 * width for i in range(layers)]
    if "num_key_value_heads" in own:
        heads = {
            "sliding_attention": config["num_key_value_heads"],
            "full_attention": own["num_key_value_heads"],
        }
        keys["attention.head_count_kv"] = [heads[kind] for kind in kinds]
    return keys


def full_layers(config: dict[str, Any]) -> dict[str, int]:
    """Sizes of the layers without a window, instead of those of the others."""
    sizes, kinds = config["per_layer_config"], config["layer_types"]
    return next(sizes[str(i)] for i, kind in enumerate(kinds) if kind == "full_attention")


def gemma4_tensors(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    size = full_layers(config)["head_dim"]
    turned = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    freqs = torch.tensor([1.0] * turned + [UNTURNED] * (size // 2 - turned))
    return {"rope_freqs.weight": freqs} | {stored_name(name): tensor for name, tensor in tensors.items()}


def stored_name(name: str) -> str:
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    match name.rsplit(".", 2)[-2:]:
        case "experts", "gate_up_proj":
            return f"{block}.ffn_gate_up_exps.weight"
        case "experts", "down_proj":
            return f"{block}.ffn_down_exps.weight"
        case "router", "scale":
            return f"{block}.ffn_gate_inp.scale"
        case "router", "per_expert_scale":
            return f"{block}.ffn_down_exps.scale"
        case _, "layer_scalar":
            return f"{name}.weight"
    return name
