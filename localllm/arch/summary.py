"""A text summary of a model's layers, with equal ones counted, in the order of their first occurrence."""

from collections import Counter

from localllm.arch.config import (
    DeltaNetConfig,
    LatentConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    ShortConvConfig,
)


def summarize_layers(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Return each distinct layer description with its count."""
    counts = Counter(f"{describe_mixer(layer.mixer)}, {describe_ffn(layer.ffn)}" for layer in config.layers)
    return tuple(counts.items())


def describe_mixer(c: Mixer) -> str:
    if isinstance(c, DeltaNetConfig):
        return f"delta net ({c.value_heads} heads of {c.key_dim} x {c.value_dim})"
    if isinstance(c, ShortConvConfig):
        return f"convolution over {c.kernel_size} tokens"
    if isinstance(c, LatentConfig):
        return f"latent attention ({c.heads} heads, latents of {c.kv_lora_rank} and keys of {c.rope_dim})"
    window = f" to the last {c.window} tokens" if c.window else ""
    shared = f", those of layer {c.kv_source}" if c.kv_source is not None else ""
    return f"attention{window} ({c.heads} heads, {c.kv_heads} KV heads of {c.head_dim}{shared})"


def describe_ffn(c: MLPConfig | MoEConfig) -> str:
    if isinstance(c, MLPConfig):
        return f"MLP of {c.intermediate_size}{'' if c.gated else ' without a gate'}"
    shared = " and a shared one" if c.shared else ""
    return f"{c.experts_per_token} of {c.experts} experts of {c.expert.intermediate_size}{shared}"
