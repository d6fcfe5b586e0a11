"""The description of a model as data. Pure Python: no torch, no files, no family names.

What varies by layer (window, rope, head counts, type of mixer) is stored in the layer, not in separate lists of
layer indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's long-context rope: low frequencies are divided by `factor`, high ones kept, with a ramp between.

    Source: `rope_type` llama3 of the Llama 3.1 model release.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens of the pre-training context


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp by the number of rotations within the original context."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    magnitude: float  # factor of cos and sin
    truncate: bool = True  # round the ramp's ends to whole dimensions


@dataclass(frozen=True)
class PerFrequencyScaling:
    """Individual divisors for all frequencies, which GGUF converters compute and store."""

    divisors: tuple[float, ...]


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024): `short` divisors up to the original context, `long` ones beyond it."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float  # factor of cos and sin


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotates only the first `rotated` pairs, at the frequencies they have among all pairs (Gemma 4)."""

    rotated: int
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | PerFrequencyScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (Su et al. 2021) on pairs (i, i + dim/2) of each head's first `dim` dimensions."""

    theta: float
    dim: int
    scaling: Scaling | None = None
    interleaved: bool = False  # pairs (0, 1), (2, 3), ... instead


@dataclass(frozen=True)
class QueryScaling:
    """Scaling of q by 1 + beta * log(1 + floor(position / original_context)) (Llama 4, Ministral 3)."""

    beta: float
    original_context: int


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped queries: heads / kv_heads query heads share each key and value head."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: no positional encoding
    scale: float  # multiplies q·k
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    softcap: float | None = None  # softcap * tanh(score / softcap) (Gemma 2)
    qk_norm: Literal["per_head", "whole"] | None = None  # RMSNorm of q and k before rope, by head or across heads
    sinks: bool = False  # a learned logit per head in the softmax, without a value (gpt-oss)
    qkv_bias: bool = False
    out_bias: bool = False
    query_growth: QueryScaling | None = None
    # Each head's result is multiplied by sigmoid(x W), whose rows follow the head's in q_proj.
    output_gate: bool = False
    value_norm: bool = False  # RMSNorm of v by head, without a weight (Gemma 4)
    keys_as_values: bool = False  # v is k before norm and rope
    kv_source: int | None = None  # the layer whose keys and values are read, instead of own ones


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    The keys and values of all heads are computed from one latent vector per token. The cache holds the latent and
    one rotated key, which all heads share.
    """

    heads: int
    q_lora_rank: int | None  # rank of the latent that queries are computed from; None: computed from x
    kv_lora_rank: int
    nope_dim: int  # dimensions of a head's query and key without rotation
    rope_dim: int  # dimensions of a head's query and key with rotation
    value_dim: int
    rope: RopeConfig
    scale: float  # multiplies q·k
    norm_eps: float  # of the norms of latents
    bias: bool = False  # of the projections from and to x, except q_proj


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta net (Yang et al. 2025): each value head has a matrix that decays and learns from every token.

    Groups of value_heads / key_heads value heads share a head of q and k. First, q, k and v pass a causal
    convolution along the tokens, per channel.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int  # of the convolution, in tokens
    # Value heads are stored as the first of each key head, then the second of each, ... (GGUF).
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state, in float32."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated causal convolution along the tokens, per channel (LFM2)."""

    channels: int
    kernel_size: int  # in tokens
    bias: bool = False
    state_shape: tuple[int, ...] = ()  # its only state is the last inputs


RecurrentConfig = DeltaNetConfig | ShortConvConfig
Mixer = AttentionConfig | LatentConfig | RecurrentConfig


@dataclass(frozen=True)
class MLPConfig:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)"""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True  # otherwise down(activation(up(x)))


@dataclass(frozen=True)
class RouterConfig:
    """Selects the experts of a token by x W^T, and their weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the weights of a token's experts sum to one
    bias: bool = False
    correction: bool = False  # a bias per expert that only affects the selection (Wang et al. 2024)
    groups: int = 1  # of experts; only those in the best `chosen_groups` are considered (DeepSeek-V3)
    chosen_groups: int = 1
    judged_by: int = 2  # a group's score is the sum of this many of its best experts
    scale: float = 1.0  # factor of all weights
    normed: bool = False  # RMSNorm of x before the router, whose weight is stored multiplied by sqrt(hidden)
    expert_scale: bool = False  # a learned factor of each expert's weight


@dataclass(frozen=True)
class MoEConfig:
    """A weighted mixture of experts, selected by a router (Shazeer et al. 2017)."""

    experts: int
    experts_per_token: int
    expert: MLPConfig
    router: RouterConfig
    shared: MLPConfig | None = None  # an expert that processes every token
    shared_gate: bool = False  # the shared expert's result is multiplied by sigmoid(x w)
    apart: bool = False  # shared and routed experts have norms of their own, behind the router (Gemma 4)
    own_experts: tuple[int, int] | None = None  # first and end of those in this process; None: all


@dataclass(frozen=True)
class NormPlacement:
    """The norms that a layer has, of four."""

    before_mixer: bool = True
    after_mixer: bool = False
    before_ffn: bool = True
    after_ffn: bool = False


@dataclass(frozen=True)
class LayerConfig:
    mixer: Mixer
    ffn: MLPConfig | MoEConfig
    norms: NormPlacement = NormPlacement()
    parallel: bool = False  # mixer and ffn read the same normalized input (Cohere)
    residual_scale: float = 1.0  # factor of the outputs of mixer and ffn
    output_scale: bool = False  # the layer's output is multiplied by a learned scalar


@dataclass(frozen=True)
class PerLayerConfig:
    """Per-layer embeddings (Gemma 3n and 4).

    Each layer adds a gated input per token, computed from a table [vocab_size, layers * dim] and from the
    embedding.
    """

    vocab_size: int
    dim: int
    activation: Activation


@dataclass(frozen=True)
class EncoderConfig:
    """Configuration of an encoder, which reads a whole text at once and returns a vector instead of tokens.

    It has no KV cache and no head. If it is not causal, windows extend equally far in both directions.
    """

    causal: bool = False  # a token attends only to those before it, as in a decoder
    positions: int = 0  # learned position embeddings (0: none)
    first_position: int = 0  # index of the first token's position embedding (RoBERTa skips some)
    token_types: int = 0  # learned type embeddings; all tokens have the first type
    embedding_norm: bool = False
    # post-norm: norms are applied to x + mixer(x) and x + ffn(x) (Vaswani et al. 2017).
    norms_of_sums: bool = False
    final_norm: bool = True
    norm_bias: bool = False


@dataclass(frozen=True)
class Stage:
    """The layers that one process of a pipeline has. The first stage also has the embedding and the head."""

    index: int
    count: int  # of stages
    first: int  # index of its first layer in the whole model
    end: int
    total: int  # layers of the whole model
    ropes: tuple[RopeConfig, ...] = ()  # of all layers of the whole model

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, layers, final norm, head; or an encoder, which is the same without the head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_embeddings: bool  # the head shares the embedding's weights
    max_context: int  # tokens
    default_context: int | None = None  # loaded unless more is requested; None: max_context
    norm: Literal["rms", "layer"] = "rms"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer: PerLayerConfig | None = None
    eos_ids: tuple[int, ...] = ()
    encoder: EncoderConfig | None = None
    stage: Stage | None = None  # that `layers` are of; None: of the whole model

    @property
    def mixtures(self) -> list[MoEConfig]:
        """Configurations of its MoE layers."""
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoEConfig)]

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers, also of other stages."""
        return self.stage.ropes if self.stage else ropes_of(self.layers)

    @property
    def has_ends(self) -> bool:
        """Whether embedding and head are part of it."""
        return self.stage is None or self.stage.index == 0


def ropes_of(layers: Sequence[LayerConfig]) -> tuple[RopeConfig, ...]:
    """Return the different rotary embeddings of layers."""
    attending = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig | LatentConfig)]
    return tuple(dict.fromkeys(mixer.rope for mixer in attending if mixer.rope))
