"""What a model is, as data. Pure Python: no torch, no files, no family names.

What varies by layer (window, rope, head counts, kind of mixer) stands in the layer, not in lists of indices beside
it.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


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
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp by the number of turns within the original context."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    magnitude: float  # on cos and sin
    truncate: bool = True  # the ramp's ends are whole dimensions


@dataclass(frozen=True)
class PerFrequencyScaling:
    """Each frequency divided by a number of its own, as GGUF files store what their converter computed."""

    divisors: tuple[float, ...]


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024): `short` divisors up to the original context, `long` ones beyond it."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float  # on cos and sin


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `rotated` pairs turn, at the frequencies they have among all (Gemma 4)."""

    rotated: int
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | PerFrequencyScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (Su et al. 2021) on pairs (i, i + dim/2) of each head's first `dim` values."""

    theta: float
    dim: int
    scaling: Scaling | None = None
    interleaved: bool = False  # pairs (0, 1), (2, 3), ... instead


@dataclass(frozen=True)
class QueryScaling:
    """q grows with its position: 1 + beta * log(1 + floor(position / original_context)) (Llama 4, Ministral 3)."""

    beta: float
    original_context: int


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped queries: heads / kv_heads query heads share each key and value head."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: no positions
    scale: float  # multiplies q·k
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # softcap * tanh(score / softcap) (Gemma 2)
    qk_norm: Literal["per_head", "whole"] | None = None  # RMSNorm of q and k before rope, by head or across heads
    sinks: bool = False  # a learnt logit per head that takes attention away (gpt-oss)
    qkv_bias: bool = False
    out_bias: bool = False
    query_growth: QueryScaling | None = None
    output_gate: bool = False  # each head's result is multiplied by sigmoid(x W), stored behind its rows of q_proj
    value_norm: bool = False  # RMSNorm of v by head, without a weight (Gemma 4)
    keys_as_values: bool = False  # v is k before its norm and rope
    kv_source: int | None = None  # the layer whose keys and values it reads, having none of its own


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one latent
    vector a token. The cache holds that and one rotated key, which all heads share."""

    heads: int
    q_lora_rank: int | None  # of the queries' own latent; None: they come from x
    kv_lora_rank: int
    nope_dim: int  # of a head's query and key, without positions
    rope_dim: int  # of a head's query and key, rotated
    value_dim: int
    rope: RopeConfig
    scale: float  # multiplies q·k
    norm_eps: float  # of the latents
    bias: bool = False  # of the projections from and to x, but for q_proj


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta net (Yang et al. 2025): each value head keeps a matrix that decays and learns from every token.

    value_heads / key_heads value heads share each head of q and k. Before it, q, k and v pass a causal
    convolution along the tokens, channel by channel.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int  # tokens that the convolution sees
    tiled: bool = False  # value heads are stored as the first of each key head, then the second of each (GGUF)

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of what it remembers, kept in float32."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated causal convolution along the tokens, channel by channel (LFM2)."""

    channels: int
    kernel_size: int  # tokens that it sees
    bias: bool = False
    state_shape: tuple[int, ...] = ()  # it remembers nothing but the last tokens


RecurrentConfig = DeltaNetConfig | ShortConvConfig
Mixer = AttentionConfig | LatentConfig | RecurrentConfig


@dataclass(frozen=True)
class MLPConfig:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True  # else down(activation(up(x)))


@dataclass(frozen=True)
class RouterConfig:
    """Which experts a token goes to, by x W^T, and with what weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the chosen experts' weights sum to one
    bias: bool = False
    correction: bool = False  # a bias an expert that counts for the choice alone (Wang et al. 2024)
    groups: int = 1  # of experts; only those in the best `chosen_groups` can be chosen (DeepSeek-V3)
    chosen_groups: int = 1
    judged_by: int = 2  # so many of its best experts, added
    scale: float = 1.0  # of all weights
    normed: bool = False  # RMSNorm of x before it, whose weight is stored times sqrt(hidden)
    expert_scale: bool = False  # a learnt factor on the weight of each expert


@dataclass(frozen=True)
class MoEConfig:
    """A router sends each token to some of the experts and adds their results, weighted (Shazeer et al. 2017)."""

    experts: int
    experts_per_token: int
    expert: MLPConfig
    router: RouterConfig
    shared: MLPConfig | None = None  # an expert that every token goes to
    shared_gate: bool = False  # its result is multiplied by sigmoid(x w)
    apart: bool = False  # it and the others stand between norms of their own, the router before them (Gemma 4)


@dataclass(frozen=True)
class NormPlacement:
    """Which of a layer's four places have a norm."""

    before_mixer: bool = True
    after_mixer: bool = False
    before_ffn: bool = True
    after_ffn: bool = False


@dataclass(frozen=True)
class LayerConfig:
    mixer: Mixer
    ffn: MLPConfig | MoEConfig
    norms: NormPlacement = NormPlacement()
    parallel: bool = False  # mixer and ffn read the same normed input (Cohere)
    residual_scale: float = 1.0  # of what mixer and ffn add
    output_scale: bool = False  # what it gives is multiplied by a learnt number


@dataclass(frozen=True)
class PerLayerConfig:
    """Each layer adds something of each token, by a gate, from a table [vocab_size, layers * dim] and from the
    embedding (Gemma 3n and 4)."""

    vocab_size: int
    dim: int
    activation: Activation


@dataclass(frozen=True)
class EncoderConfig:
    """What is otherwise in a model that reads a whole text at once and gives a vector instead of tokens: it keeps
    no keys and values, and has no head. Where it looks ahead, windows reach as far ahead as back."""

    causal: bool = False  # a token sees those before it alone: a decoder's layers
    positions: int = 0  # learnt, added to the embedding (0: none)
    first_position: int = 0  # of these, the first token's (RoBERTa leaves out some)
    token_types: int = 0  # of tokens, learnt, added to the embedding: all tokens are of the first
    embedding_norm: bool = False
    norms_of_sums: bool = False  # the norms after mixer and ffn are of x and what they add (Vaswani et al. 2017)
    final_norm: bool = True
    norm_bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, layers, final norm, head; or an encoder, which is the same without the head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_embeddings: bool  # the head is the embedding
    max_context: int  # tokens
    default_context: int | None = None  # what is loaded if nobody asks for more; None: max_context
    norm: Literal["rms", "layer"] = "rms"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer: PerLayerConfig | None = None
    eos_ids: tuple[int, ...] = ()
    encoder: EncoderConfig | None = None
