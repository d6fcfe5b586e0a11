"""A Hugging Face checkpoint written as GGUF, as llama.cpp's convert_hf_to_gguf.py writes it (without a tokenizer).

Names come from the `gguf` package's own table, the transformations from the converter's classes.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_gemma4 import gemma4_keys, gemma4_tensors
from tests.gguf_hybrids import hybrid_keys, hybrid_tensors
from tests.gguf_latent import latent_keys, latent_tensors

Kind = gguf.GGMLQuantizationType

ARCHITECTURES = {
    "Llama": "LLAMA",
    "Mistral": "LLAMA",
    "Mixtral": "LLAMA",
    "Ministral3": "MISTRAL3",
    "Qwen2": "QWEN2",
    "Qwen3": "QWEN3",
    "Qwen3Moe": "QWEN3MOE",
    "Glm4Moe": "GLM4_MOE",
    "Gemma2": "GEMMA2",
    "Gemma3": "GEMMA3",
    "Gemma4": "GEMMA4",
    "DeepseekV2": "DEEPSEEK2",
    "DeepseekV3": "DEEPSEEK2",
    "Glm4MoeLite": "DEEPSEEK2",
    "Phi3": "PHI3",
    "GptOss": "GPT_OSS",
    "SmolLM3": "SMOLLM3",
    "Olmo2": "OLMO2",
    "Olmo3": "OLMO2",
    "Granite": "GRANITE",
    "Glm4": "GLM4",
    "Cohere2": "COHERE2",
    "Qwen3Next": "QWEN3NEXT",
    "Qwen3_5": "QWEN35",
    "Qwen3_5Moe": "QWEN35MOE",
    "Lfm2": "LFM2",
    "Lfm2Moe": "LFM2MOE",
}
HYBRIDS = ("QWEN3NEXT", "QWEN35", "QWEN35MOE", "LFM2", "LFM2MOE")
KEYS = {  # config.json: key, after the architecture
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
}
WITH_WINDOWS = ("GEMMA2", "GEMMA3", "GEMMA4", "GPT_OSS", "COHERE2", "PHI3", "OLMO2")
PAIRS_SIDE_BY_SIDE = ("LLAMA", "MISTRAL3", "SMOLLM3", "GRANITE")


def write_gguf(
    folder: Path,
    file: Path,
    kind: Kind = Kind.F32,
    *,
    dequantized: bool = False,
    without: Collection[str] = (),
    changed: Mapping[str, Any] | None = None,
    tensors_per_file: int = 0,
) -> None:
    """Write a GGUF file.

    `kind`: of the matrices whose rows are complete blocks of it; all other tensors are float32. dequantized:
    float32, rounded to values of `kind`; without: keys (after the architecture) and tensors to omit; changed:
    further keys.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    if family not in ARCHITECTURES:
        raise LookupError(
            f"{family} has no GGUF architecture; add it to ARCHITECTURES in tests/gguf_writer.py, or the row of "
            "tests/models/families.py to NOT_IN_GGUF"
        )
    architecture = ARCHITECTURES[family]
    arch = gguf.MODEL_ARCH[architecture]
    changed = dict(changed or {})
    name = changed.pop("general.architecture", gguf.MODEL_ARCH_NAMES[arch])
    writer = gguf.GGUFWriter(file, name, split_max_tensors=tensors_per_file)
    keys = keys_of(architecture, config)
    keys = {f"{writer.arch}.{key}": value for key, value in keys.items() if key not in without}
    keys |= {key: value for key, value in changed.items() if not isinstance(value, Tensor)}
    for key, value in keys.items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = converted(load_file(folder / "model.safetensors"), architecture, config)
    tensors |= {name: value for name, value in changed.items() if isinstance(value, Tensor)}
    for stored, tensor in tensors.items():
        name = names.get_name(stored, (".weight", ".bias")) or stored
        if name in without:
            continue
        data = np.ascontiguousarray(tensor.float().numpy())
        block = gguf.GGML_QUANT_SIZES[kind][0]
        packed = kind if data.ndim > 1 and data.shape[-1] % block == 0 and name.endswith(".weight") else Kind.F32
        if dequantized:
            writer.add_tensor(name, gguf.dequantize(gguf.quantize(data, packed), packed), raw_dtype=Kind.F32)
        else:
            writer.add_tensor(name, gguf.quantize(data, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def keys_of(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Keys after the architecture; None omits a key."""
    keys = {key: config[name] for name, key in KEYS.items() if name in config}
    if architecture == "GPT_OSS":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "GLM4_MOE":
        keys["expert_weights_norm"] = config["norm_topk_prob"]
    if architecture in WITH_WINDOWS and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
        if kinds := config.get("layer_types"):
            keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if architecture in HYBRIDS:
        keys |= hybrid_keys(architecture, config)
    ropes = config["rope_parameters"]
    if "full_attention" in ropes:
        keys["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
        ropes = ropes["full_attention"]
    keys["rope.freq_base"] = float(ropes["rope_theta"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys["rope.dimension_count"] = int(head * ropes.get("partial_rotary_factor", 1.0))
    if ropes["rope_type"] in ("linear", "yarn", "longrope"):
        original = ropes.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        keys |= {
            "rope.scaling.type": ropes["rope_type"],
            "rope.scaling.factor": ropes.get("factor"),
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": ropes.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": ropes.get("beta_slow"),
            "attention.temperature_scale": ropes.get("llama_4_scaling_beta"),
        }
    if architecture == "DEEPSEEK2":
        keys |= latent_keys(config)
    if architecture == "GEMMA4":
        keys |= gemma4_keys(config)
    return keys


def converted(tensors: dict[str, Tensor], architecture: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors as the converter stores them, by the names in the gguf package's table."""
    if architecture in HYBRIDS:
        tensors = hybrid_tensors(tensors, architecture, config)
    if architecture == "DEEPSEEK2":
        tensors = latent_tensors(tensors, config)
    if architecture == "GEMMA4":
        tensors = gemma4_tensors(tensors, config)
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if architecture in PAIRS_SIDE_BY_SIDE and ".q_proj." in name:
            tensor = side_by_side(tensor, config["num_attention_heads"])
        if architecture in PAIRS_SIDE_BY_SIDE and ".k_proj." in name:
            tensor = side_by_side(tensor, config["num_key_value_heads"])
        if architecture in ("GEMMA2", "GEMMA3") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture == "GPT_OSS":
            found |= gpt_oss(name, tensor)
        elif ".experts." in name:
            before, after = name.split(".experts.")
            number, matrix = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{matrix}", {})[int(number)] = tensor
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    for name, each in experts.items():
        # As those of Mixtral and LFM2 are called once stacked.
        name = re.sub(r"^model\.(.*)(block_sparse_moe|feed_forward)\.", r"\1feed_forward.", name)
        found[name] = torch.stack([each[i] for i in range(len(each))])
    return found | rope_factors(config)


def side_by_side(rows: Tensor, heads: int) -> Tensor:
    """LlamaModel.permute: move the two values of each rotary pair next to each other."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gpt_oss(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if ".experts." not in name:
        return {name: tensor}
    stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if not stem.endswith("gate_up_proj"):
        return {f"{stem}.{kind}": rows}
    return {
        f"{stem.replace('gate_up_proj', 'gate_proj')}.{kind}": rows[:, ::2],
        f"{stem.replace('gate_up_proj', 'up_proj')}.{kind}": rows[:, 1::2],
    }


def rope_factors(config: dict[str, Any]) -> dict[str, Tensor]:
    ropes = config["rope_parameters"]
    match ropes.get("rope_type"):
        case "longrope":
            return {
                "rope_factors_long.weight": torch.tensor(ropes["long_factor"]),
                "rope_factors_short.weight": torch.tensor(ropes["short_factor"]),
            }
        case "llama3":
            return {"rope_freqs.weight": divisors(ropes, config["head_dim"])}
    return {}


def divisors(ropes: dict[str, Any], size: int) -> Tensor:
    """LlamaModel.generate_extra_tensors: divisors of the frequencies in Llama 3.1's scaling."""
    found = []
    for frequency in 1.0 / ropes["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size):
        wavelength = 2 * math.pi / frequency.item()
        turns = ropes["original_max_position_embeddings"] / wavelength
        low, high, factor = ropes["low_freq_factor"], ropes["high_freq_factor"], ropes["factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found)
