"""What a decoder is, as data. Pure Python: no torch, no files, no family names.

What varies by layer (window, rope, head counts) stands in the layer, not in lists of indices beside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's long-context rope: low frequencies are divided by `factor`, high ones kept, a ramp between.

    Source: `rope_type` llama3 of the Llama 3.1 model release.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens of the pre-training context


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (Su et al. 2021) on pairs (i, i + dim/2) of each head's first `dim` values."""

    theta: float
    dim: int
    scaling: Llama3Scaling | LinearScaling | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped queries: heads / kv_heads query heads share each key and value head."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # multiplies q·k
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    qk_norm: bool = False  # RMSNorm of each head's q and k before rope (Qwen3)
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class MLPConfig:
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True)
class LayerConfig:
    mixer: AttentionConfig
    ffn: MLPConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, layers with a norm before mixer and ffn, final norm, head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_embeddings: bool  # the head is the embedding
    max_context: int  # tokens
    eos_ids: tuple[int, ...] = ()
