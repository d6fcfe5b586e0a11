"""Headers of published models whose shapes come with the program, so that plans and simulations of them need no
network.

They equal what the files on the Hub begin with, except for the names of files and generation settings.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from localllm.arch.describe import tensor_layout
from localllm.checkpoint.header import Header, TensorHeader

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
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama3.1:8b-bf16": LLAMA_8B,
    "llama3.1:70b-bf16": LLAMA_70B,
}
"""config.json of models by their names in the catalogue."""


def published_header(name: str) -> Header | None:
    """Return the header of a model of the catalogue; None if its shapes are not in this file."""
    if (config := CONFIGS.get(name)) is None:
        return None
    file, layout = Path("model.safetensors"), tensor_layout(config)
    tensors = {
        str(layout.runtime_name(tensor)): TensorHeader(file, tensor, "BF16", shape)
        for tensor, shape in llama_shapes(config)
    }
    return Header(Path(name), dict(config), {}, tensors, layout)


def llama_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a Llama with their shapes, by their names in its files."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
