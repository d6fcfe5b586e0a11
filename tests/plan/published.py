"""Configurations of published models, headers derived from them, and files that contain only a header."""

import json
from pathlib import Path
from typing import Any

from localllm.arch.describe import parse_config, tensor_layout
from localllm.checkpoint.header import DTYPE_BYTES, Header, TensorHeader

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a Llama, or a Mixtral, by the names in its files."""
    hidden, wide, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    of_layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if experts := config.get("num_local_experts"):
        of_layer["block_sparse_moe.gate"] = (experts, hidden)
        mlps = {f"block_sparse_moe.experts.{expert}.": ("w1", "w3", "w2") for expert in range(experts)}
    else:
        mlps = {"mlp.": ("gate_proj", "up_proj", "down_proj")}
    for prefix, (gate, up, down) in mlps.items():
        of_layer |= {prefix + gate: (wide, hidden), prefix + up: (wide, hidden), prefix + down: (hidden, wide)}
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    return found


def header_of(config: dict[str, Any], dtype: str = "BF16") -> Header:
    spelling = tensor_layout(config)
    parse_config(config)
    file = Path("model.safetensors")
    tensors = {
        spelling.runtime_name(name): TensorHeader(file, name, dtype, s) for name, s in shapes(config).items()
    }
    return Header(Path("model"), config, {}, {str(name): tensor for name, tensor in tensors.items()}, spelling)


def write_sparse(folder: Path, config: dict[str, Any], dtype: str = "BF16") -> Path:
    """Write the files that a plan reads, and a sparse file of weights with the real length."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, tensor in ((t.name, t) for t in header_of(config, dtype).tensors.values()):
        size = tensor.elements * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [end, end + size]}
        end += size
    begin = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(begin).to_bytes(8, "little") + begin)
        file.truncate(8 + len(begin) + end)
    return folder
