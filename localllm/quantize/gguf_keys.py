"""A model's description as the metadata of a GGUF file, and the GGUF names of tensors. No torch.

Source: llama.cpp's `conversion/*.py` and `src/models/*.cpp`. Models that these cannot represent raise
UnsupportedModel.
"""

import math
from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    RopeConfig,
)
from localllm.arch.describe import parse_config
from localllm.checkpoint.gguf.names import BLOCK, GLOBAL_NAMES, LAYER_NAMES
from localllm.checkpoint.header import Header
from localllm.errors import UnsupportedModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_FREQUENCIES = "rope_freqs.weight"
OUTER_NAMES = {ours: theirs for theirs, ours in reversed(GLOBAL_NAMES.items())}
INNER_NAMES = {ours: theirs for theirs, ours in reversed(LAYER_NAMES.items())}


def gguf_architecture(header: Header) -> str:
    """Return GGUF's name of the architecture. Raises UnsupportedModel for a model that it cannot represent."""
    [family, *_] = header.config["architectures"]
    if family not in ARCHITECTURES:
        names = ", ".join(name.removesuffix("ForCausalLM") for name in ARCHITECTURES)
        raise unsupported_model(f"{family} models", f"these families can be converted: {names}")
    config = parse_config(header.config)
    if config != expressible_config(config, ARCHITECTURES[family]):
        raise unsupported_model(
            f"a {family} model with windows, scales or an unusual rope",
            "leave out --to gguf: a folder keeps them",
        )
    return ARCHITECTURES[family]


def expressible_config(config: ModelConfig, architecture: str) -> ModelConfig:
    """Return the model that llama.cpp would construct from the keys; if it differs, the keys cannot represent
    `config`.
    """
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    rope = mixer.rope if isinstance(mixer, AttentionConfig) else None
    if not isinstance(mixer, AttentionConfig) or not isinstance(ffn, MLPConfig) or rope is None:
        raise unsupported_model(f"{architecture} models of this type", "leave out --to gguf")
    scaling = rope.scaling if isinstance(rope.scaling, LinearScaling | Llama3Scaling) else None
    layer = LayerConfig(
        AttentionConfig(
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            rope=RopeConfig(rope.theta, mixer.head_dim, scaling),
            scale=mixer.head_dim**-0.5,
            qk_norm="per_head" if architecture == "qwen3" else None,
            qkv_bias=mixer.qkv_bias and architecture != "qwen3",
            out_bias=mixer.out_bias and architecture == "llama",
        ),
        MLPConfig(ffn.intermediate_size, bias=ffn.bias and architecture == "llama"),
    )
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=(layer,) * len(config.layers),
        norm_eps=config.norm_eps,
        tie_embeddings=config.tie_embeddings,
        max_context=config.max_context,
        default_context=config.default_context,
        eos_ids=config.eos_ids,
    )


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys after the architecture, for a model that `gguf_architecture` accepts."""
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert isinstance(mixer, AttentionConfig) and isinstance(ffn, MLPConfig) and mixer.rope
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": len(config.layers),
        "feed_forward_length": ffn.intermediate_size,
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": mixer.rope.dim,
        "rope.freq_base": float(mixer.rope.theta),
    }
    if isinstance(mixer.rope.scaling, LinearScaling):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(mixer.rope.scaling.factor)}
    return keys


def rope_frequency_divisors(config: ModelConfig) -> list[float] | None:
    """Return the divisors of frequencies for Llama 3.1's scaling, which GGUF stores as a tensor; otherwise
    None.
    """
    mixer = config.layers[0].mixer
    rope = mixer.rope if isinstance(mixer, AttentionConfig) else None
    if rope is None or not isinstance(scaling := rope.scaling, Llama3Scaling):
        return None
    divisors: list[float] = []
    for pair in range(0, rope.dim, 2):
        rotations = scaling.original_context / (2 * math.pi * rope.theta ** (pair / rope.dim))
        ramp = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(1.0, max(0.0, ramp))
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return divisors


def gguf_name(name: str) -> str:
    """Return the GGUF name for a runtime name."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, inner = name.split(".", 2)
    stem, _, suffix = inner.rpartition(".")
    block_name = f"blk.{layer}.{INNER_NAMES[stem]}.{suffix}"
    assert BLOCK.fullmatch(block_name)
    return block_name


def unsupported_model(what: str, remedy: str) -> UnsupportedModel:
    return UnsupportedModel(f"{what} cannot be written as GGUF", remedy)
