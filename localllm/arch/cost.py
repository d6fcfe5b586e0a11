"""The cost of a model, from its description alone.

`load` sizes the cache by it, `plan` predicts speeds by it, and the benchmark reports the model's size.
"""

import functools
import math
from dataclasses import dataclass

from localllm.arch.config import (
    AttentionConfig,
    DeltaNetConfig,
    EncoderConfig,
    LatentConfig,
    LayerConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RecurrentConfig,
    ShortConvConfig,
)

STATE_ELEMENT_BYTES = 4  # delta net states accumulate over thousands of tokens, so they are in float32


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights in memory, by how a step reads them."""

    layers: int  # everything else: read in every step
    experts: int  # those that the step's tokens select are read
    head: int  # read if logits are computed; a tied head is the embedding
    tables: int  # lookup tables: one row per token is read

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.head + self.tables


@dataclass(frozen=True)
class SequenceStep:
    """The part of a step that belongs to one sequence, or to each of several equal ones."""

    tokens: int  # that are computed
    context: int  # tokens in the cache once the step has run
    logits: int = 1  # positions whose logits are computed
    sequences: int = 1


Step = tuple[SequenceStep, ...]


def parameter_count(config: ModelConfig) -> int:
    """Return the number of weights, counting a tied head once."""
    embedding = config.vocab_size * config.hidden_size
    layers = sum(layer_parameters(layer, config.hidden_size) for layer in config.layers)
    if config.encoder:
        return embedding + layers + encoder_parameters(config.encoder, config)
    outside = embedding * (1 if config.tie_embeddings else 2) + config.hidden_size
    return outside + layers + per_layer_parameters(config)


def encoder_parameters(c: EncoderConfig, config: ModelConfig) -> int:
    """Return an encoder's parameters outside layers and token embedding, and the biases of the layers' norms."""
    norm_placement = config.layers[0].norms
    layer_norms = len(config.layers) * (
        norm_placement.after_mixer
        + norm_placement.after_ffn
        + norm_placement.before_mixer
        + norm_placement.before_ffn
    )
    norms = (c.embedding_norm + c.final_norm) * (1 + c.norm_bias) + layer_norms * c.norm_bias
    return (c.positions + c.token_types + norms) * config.hidden_size


def per_layer_parameters(config: ModelConfig) -> int:
    """Return the parameters of per-layer embeddings: the table, its projection, and the layers' gates."""
    if config.per_layer is None:
        return 0
    c, hidden, layers = config.per_layer, config.hidden_size, len(config.layers)
    return (c.vocab_size + hidden) * layers * c.dim + c.dim + layers * (2 * hidden * c.dim + hidden)


def active_parameter_count(config: ModelConfig) -> int:
    """Return the number of weights used for one token: only selected experts, and one row of a per-layer table."""
    inactive = sum(
        (c.experts - c.experts_per_token) * ffn_parameters(c.expert, config.hidden_size) for c in config.mixtures
    )
    if config.per_layer:
        inactive += (config.per_layer.vocab_size - 1) * len(config.layers) * config.per_layer.dim
    return parameter_count(config) - inactive


def layer_parameters(layer: LayerConfig, hidden: int) -> int:
    placement = layer.norms
    norms = placement.before_mixer + placement.after_mixer + placement.before_ffn + placement.after_ffn
    vectors = norms * hidden + layer.output_scale
    return mixer_parameters(layer.mixer, hidden) + ffn_parameters(layer.ffn, hidden) + vectors


def mixer_parameters(c: Mixer, hidden: int) -> int:
    match c:
        case AttentionConfig():
            return attention_parameters(c, hidden)
        case LatentConfig():
            return latent_parameters(c, hidden)
        case DeltaNetConfig():
            values = c.value_heads * c.value_dim
            weights = hidden * (c.channels + values + 2 * c.value_heads) + values * hidden
            return weights + c.channels * c.kernel_size + 2 * c.value_heads + c.value_dim
        case ShortConvConfig():
            return 4 * hidden * hidden + c.channels * c.kernel_size + c.bias * (4 * hidden + c.channels)


def attention_parameters(c: AttentionConfig, hidden: int) -> int:
    has_kv = c.kv_source is None  # keys and values
    queries, keys = c.heads * c.head_dim, has_kv * c.kv_heads * c.head_dim
    rows = queries * (1 + c.output_gate) + keys * (1 if c.keys_as_values else 2)
    weights = hidden * rows + queries * hidden
    biases = c.qkv_bias * rows + c.out_bias * hidden
    norms = {None: 0, "per_head": (1 + has_kv) * c.head_dim, "whole": queries + keys}[c.qk_norm]
    return weights + biases + norms + c.sinks * c.heads


def latent_parameters(c: LatentConfig, hidden: int) -> int:
    queries, values = c.heads * (c.nope_dim + c.rope_dim), c.heads * c.value_dim
    rank, q_rank, down = c.kv_lora_rank, c.q_lora_rank, c.kv_lora_rank + c.rope_dim
    q_weights = q_rank * (hidden + 1 + queries) + c.bias * q_rank if q_rank else hidden * queries
    kv_weights = down * (hidden + c.bias) + rank * (1 + c.heads * c.nope_dim + values)
    return q_weights + kv_weights + (values + c.bias) * hidden


def ffn_parameters(c: MLPConfig | MoEConfig, hidden: int) -> int:
    if isinstance(c, MoEConfig):
        router = c.experts * (hidden + c.router.bias + c.router.correction + c.router.expert_scale)
        router += c.router.normed * hidden + c.apart * 4 * hidden
        shared = ffn_parameters(c.shared, hidden) + c.shared_gate * hidden if c.shared else 0
        return router + shared + c.experts * ffn_parameters(c.expert, hidden)
    up_projections = 1 + c.gated
    return (up_projections + 1) * hidden * c.intermediate_size + c.bias * (
        up_projections * c.intermediate_size + hidden
    )


def kv_bytes_per_token(config: ModelConfig, element_bytes: float, scale_bytes: float = 0) -> int:
    """Return the bytes of keys and values per token, in all attention layers; 0 for an encoder.

    scale_bytes: of the scale of a head's vector, if keys and values are quantized. Both are means of keys and
    values if these differ.
    """
    mixers = [layer.mixer for layer in config.layers if not config.encoder]
    return int(sum(cached_elements(c) * element_bytes + cached_vectors(c) * scale_bytes for c in mixers))


def why_not_4_bit_cache(config: ModelConfig) -> str | None:
    """Return why keys and values cannot be stored in 4 bits, or None if they can."""
    for c in (layer.mixer for layer in config.layers if not config.encoder):
        if isinstance(c, LatentConfig):
            return "it caches latents (MLA), which take 8 bits or more"
        if isinstance(c, AttentionConfig) and c.head_dim % 2:
            return f"a byte stores two dimensions, and its heads have {c.head_dim}"
    return None


def cached_elements(c: Mixer) -> int:
    """Return how many elements one layer caches per token."""
    match c:
        case AttentionConfig():
            return 0 if c.kv_source is not None else 2 * c.kv_heads * c.head_dim
        case LatentConfig():
            return c.kv_lora_rank + c.rope_dim
        case _:
            return 0  # it has a recurrent state instead


def cached_vectors(c: Mixer) -> int:
    """Return how many vectors one layer caches per token: a key and a value per head, or a latent and its key."""
    heads = c.kv_heads if isinstance(c, AttentionConfig) else 1
    return 2 * heads if cached_elements(c) else 0


def state_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return the bytes of all recurrent states of one sequence, which do not depend on its length; 0 without
    any.
    """
    mixers = [layer.mixer for layer in config.layers]
    return sum(
        (c.kernel_size - 1) * c.channels * element_bytes
        + bool(c.state_shape) * math.prod(c.state_shape) * STATE_ELEMENT_BYTES
        for c in mixers
        if isinstance(c, RecurrentConfig)
    )


def bytes_read(
    config: ModelConfig,
    weights: WeightBytes,
    step: Step,
    element_bytes: int,
    kv: tuple[float, float] | None = None,
) -> int:
    """Return the bytes that a step reads: weights, except table rows; keys and values; recurrent states.

    element_bytes: of the caches; kv: bytes of an element of keys and values and of a scale, if they differ.
    """
    head = weights.head if any(share.logits for share in step) else 0
    experts = weights.experts * expert_fraction_read(config, token_count(step))
    states = state_bytes(config, element_bytes) * sum(share.sequences for share in step)
    return weights.layers + head + round(experts) + kv_bytes_read(config, step, *(kv or (element_bytes,))) + states


def token_count(step: Step) -> int:
    return sum(share.tokens * share.sequences for share in step)


def kv_bytes_read(config: ModelConfig, step: Step, element_bytes: float, scale_bytes: float = 0) -> int:
    """Return the bytes of visible keys and values, limited by windows; shared ones count for each layer that reads
    them.

    scale_bytes: see `kv_bytes_per_token`.
    """
    mixers = [layer.mixer for layer in config.layers if not config.encoder]
    token_bytes = [
        elements_read_per_token(c) * element_bytes + vectors_read_per_token(c) * scale_bytes for c in mixers
    ]
    return sum(
        int(size * tokens_seen(c, share)) * share.sequences
        for c, size in zip(mixers, token_bytes, strict=True)
        for share in step
    )


def expert_fraction_read(config: ModelConfig, tokens: int) -> float:
    """Return the expected fraction of expert weights that a step with `tokens` tokens reads.

    It is 1 - (1 - k / E)^tokens if every expert is equally likely; routers with preferences read fewer.
    """
    sizes = [c.experts * ffn_parameters(c.expert, config.hidden_size) for c in config.mixtures]
    shares = [selected_fraction(c, tokens) for c in config.mixtures]
    read = sum(size * share for size, share in zip(sizes, shares, strict=True))
    return read / sum(sizes) if sizes else 0.0


def selected_fraction(c: MoEConfig, tokens: int) -> float:
    """Return the expected fraction of an MoE layer's experts that at least one of `tokens` tokens selects."""
    return 1 - (1 - c.experts_per_token / c.experts) ** tokens


def expert_imbalance(config: ModelConfig, tokens: int, ranks: int) -> float:
    """Return how many times the mean of all ranks the busiest one reads of the experts that tokens select, if each
    rank has whole experts and every expert is equally likely; the mean of all mixtures.
    """
    factors: list[float] = []
    for c in config.mixtures:
        selected = max(1, round(c.experts * selected_fraction(c, tokens)))
        factors.append(busiest_rank_experts(c.experts, selected, ranks) * ranks / selected)
    return sum(factors) / len(factors) if factors else 1.0


@functools.cache
def busiest_rank_experts(experts: int, selected: int, ranks: int) -> float:
    """Return the expected number of selected experts on the rank that has most of them, of `experts / ranks` each.

    It is the largest count of a multivariate hypergeometric distribution.
    """
    own, choices = experts // ranks, math.comb(experts, selected)
    expected = 0.0
    for limit in range(min(own, selected)):  # the mean of a count is the sum of P(count > limit)
        # Ways to select each number of a rank's experts, as digits of `experts` bits: powers add the numbers.
        within = sum(math.comb(own, count) << experts * count for count in range(limit + 1))
        ways = within**ranks >> experts * selected & (1 << experts) - 1
        expected += 1 - ways / choices
    return expected


def elements_read_per_token(c: Mixer) -> int:
    """Return how many cached elements per token a layer reads, including another layer's."""
    return 2 * c.kv_heads * c.head_dim if isinstance(c, AttentionConfig) else cached_elements(c)


def vectors_read_per_token(c: Mixer) -> int:
    """Return how many cached vectors per token a layer reads."""
    return 2 * c.kv_heads if isinstance(c, AttentionConfig) else cached_vectors(c)


def tokens_seen(c: Mixer, share: SequenceStep) -> int:
    """Return the number of cached tokens that any of the step's tokens attends to."""
    window = c.window if isinstance(c, AttentionConfig) else None
    return min(share.context, window + share.tokens - 1) if window else share.context


def query_key_pairs(c: Mixer, share: SequenceStep) -> int:
    """Return the number of pairs of a query and a visible key."""
    window = c.window if isinstance(c, AttentionConfig) and c.window else share.context
    first = share.context - share.tokens + 1  # keys visible to the first query without a window
    growing_count = max(0, min(window, share.context) - first + 1)
    return growing_count * (2 * first + growing_count - 1) // 2 + (share.tokens - growing_count) * window


def flops(config: ModelConfig, step: Step) -> int:
    """Return the floating-point operations of a step's matrix products, attention and delta nets.

    Matrix products have two per weight and token.
    """
    embedding = config.vocab_size * config.hidden_size
    outside = embedding * (1 if config.tie_embeddings or config.encoder else 2)
    if config.per_layer:
        outside += len(config.layers) * config.per_layer.dim
    token_weights, mixers = active_parameter_count(config) - outside, [layer.mixer for layer in config.layers]

    def sequence_flops(share: SequenceStep) -> int:
        products = 2 * (token_weights * share.tokens + (0 if config.encoder else embedding * share.logits))
        return products + sum(mixer_flops(c, share) for c in mixers)

    return sum(sequence_flops(share) * share.sequences for share in step)


def mixer_flops(c: Mixer, share: SequenceStep) -> int:
    """Return a layer's floating-point operations on previous tokens, besides its weights' products."""
    match c:
        case AttentionConfig():
            return 4 * c.heads * c.head_dim * query_key_pairs(c, share)
        case LatentConfig():
            # The cheaper of attending to latents and expanding keys and values again (kernels/latent.py).
            absorbed = query_key_pairs(c, share) * (2 * c.kv_lora_rank + c.rope_dim)
            reexpanded = (share.context - share.tokens) * (c.nope_dim + c.value_dim) * c.kv_lora_rank
            expanded = reexpanded + query_key_pairs(c, share) * (c.nope_dim + c.rope_dim + c.value_dim)
            return 2 * c.heads * min(absorbed, expanded)
        case DeltaNetConfig():
            return 6 * math.prod(c.state_shape) * share.tokens  # S^T k, S^T q, and the correction
        case ShortConvConfig():
            return 0
