"""What a model costs, from its description alone: `load` sizes the cache by it, `plan` predicts speeds by it, the
benchmark names its size."""

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

STATE_ELEMENT_BYTES = 4  # what a delta net remembers is summed up over thousands of tokens: float32


@dataclass(frozen=True)
class WeightBytes:
    """What weights take in memory, by how a step reads them."""

    layers: int  # norms and whatever else is no expert: all of it in every step
    experts: int  # those that the step's tokens go to
    head: int  # where logits are wanted; a tied one is the embedding
    tables: int  # that are looked up: a row a token

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.head + self.tables


@dataclass(frozen=True)
class SequenceStep:
    """What one sequence brings to a step, or each of several that bring the same."""

    tokens: int  # that it computes
    context: int  # tokens in its cache once the step has run
    logits: int = 1  # positions whose logits are wanted
    sequences: int = 1


Step = tuple[SequenceStep, ...]


def parameter_count(config: ModelConfig) -> int:
    """How many weights the model has; a tied head counts once."""
    embedding = config.vocab_size * config.hidden_size
    layers = sum(layer_parameters(layer, config.hidden_size) for layer in config.layers)
    if config.encoder:
        return embedding + layers + encoder_parameters(config.encoder, config)
    outside = embedding * (1 if config.tie_embeddings else 2) + config.hidden_size
    return outside + layers + per_layer_parameters(config)


def encoder_parameters(c: EncoderConfig, config: ModelConfig) -> int:
    """Outside of layers and the embedding of tokens; of norms in the layers the biases."""
    places = config.layers[0].norms
    in_layers = len(config.layers) * (
        places.after_mixer + places.after_ffn + places.before_mixer + places.before_ffn
    )
    norms = (c.embedding_norm + c.final_norm) * (1 + c.norm_bias) + in_layers * c.norm_bias
    return (c.positions + c.token_types + norms) * config.hidden_size


def per_layer_parameters(config: ModelConfig) -> int:
    """Of the table and the projection beside it, and of all layers' gates."""
    if config.per_layer is None:
        return 0
    c, hidden, layers = config.per_layer, config.hidden_size, len(config.layers)
    return (c.vocab_size + hidden) * layers * c.dim + c.dim + layers * (2 * hidden * c.dim + hidden)


def active_parameter_count(config: ModelConfig) -> int:
    """How many of them one token meets: of a mixture only the chosen experts, of a per-layer table one row."""
    mixtures = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoEConfig)]
    passed_over = sum(
        (c.experts - c.experts_per_token) * ffn_parameters(c.expert, config.hidden_size) for c in mixtures
    )
    if config.per_layer:
        passed_over += (config.per_layer.vocab_size - 1) * len(config.layers) * config.per_layer.dim
    return parameter_count(config) - passed_over


def layer_parameters(layer: LayerConfig, hidden: int) -> int:
    places = layer.norms
    norms = places.before_mixer + places.after_mixer + places.before_ffn + places.after_ffn
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
    own = c.kv_source is None  # keys and values
    queries, keys = c.heads * c.head_dim, own * c.kv_heads * c.head_dim
    rows = queries * (1 + c.output_gate) + keys * (1 if c.keys_as_values else 2)
    weights = hidden * rows + queries * hidden
    biases = c.qkv_bias * rows + c.out_bias * hidden
    norms = {None: 0, "per_head": (1 + own) * c.head_dim, "whole": queries + keys}[c.qk_norm]
    return weights + biases + norms + c.sinks * c.heads


def latent_parameters(c: LatentConfig, hidden: int) -> int:
    queries, values = c.heads * (c.nope_dim + c.rope_dim), c.heads * c.value_dim
    rank, q_rank, down = c.kv_lora_rank, c.q_lora_rank, c.kv_lora_rank + c.rope_dim
    of_q = q_rank * (hidden + 1 + queries) + c.bias * q_rank if q_rank else hidden * queries
    of_kv = down * (hidden + c.bias) + rank * (1 + c.heads * c.nope_dim + values)
    return of_q + of_kv + (values + c.bias) * hidden


def ffn_parameters(c: MLPConfig | MoEConfig, hidden: int) -> int:
    if isinstance(c, MoEConfig):
        router = c.experts * (hidden + c.router.bias + c.router.correction + c.router.expert_scale)
        router += c.router.normed * hidden + c.apart * 4 * hidden
        shared = ffn_parameters(c.shared, hidden) + c.shared_gate * hidden if c.shared else 0
        return router + shared + c.experts * ffn_parameters(c.expert, hidden)
    wide = 1 + c.gated
    return (wide + 1) * hidden * c.intermediate_size + c.bias * (wide * c.intermediate_size + hidden)


def kv_bytes_per_token(config: ModelConfig, element_bytes: int, scale_bytes: int = 0) -> int:
    """Keys and values of one token in all layers that attend. scale_bytes: of a scale for each vector of a head,
    if they are quantized. An encoder keeps none."""
    mixers = [layer.mixer for layer in config.layers if not config.encoder]
    return sum(cached_elements(c) * element_bytes + cached_vectors(c) * scale_bytes for c in mixers)


def cached_elements(c: Mixer) -> int:
    """How many numbers the cache of one layer holds for a token."""
    match c:
        case AttentionConfig():
            return 0 if c.kv_source is not None else 2 * c.kv_heads * c.head_dim
        case LatentConfig():
            return c.kv_lora_rank + c.rope_dim
        case _:
            return 0  # it keeps a state instead


def cached_vectors(c: Mixer) -> int:
    """Of how many vectors those are: a key and a value of each head, or a latent and its key."""
    heads = c.kv_heads if isinstance(c, AttentionConfig) else 1
    return 2 * heads if cached_elements(c) else 0


def state_bytes(config: ModelConfig, element_bytes: int) -> int:
    """What all recurrent layers keep of one sequence, however long it is; 0 for a model without any."""
    mixers = [layer.mixer for layer in config.layers]
    return sum(
        (c.kernel_size - 1) * c.channels * element_bytes
        + bool(c.state_shape) * math.prod(c.state_shape) * STATE_ELEMENT_BYTES
        for c in mixers
        if isinstance(c, RecurrentConfig)
    )


def bytes_read(
    config: ModelConfig, weights: WeightBytes, step: Step, element_bytes: int, kv: tuple[int, int] | None = None
) -> int:
    """What a step has to read, each once: weights, but for the few rows of tables; keys and values; recurrent
    states. element_bytes: of the caches; kv: of a key's or value's element and its scale, where they differ."""
    head = weights.head if any(share.logits for share in step) else 0
    experts = weights.experts * expert_fraction_read(config, sum(share.tokens * share.sequences for share in step))
    states = state_bytes(config, element_bytes) * sum(share.sequences for share in step)
    return weights.layers + head + round(experts) + kv_bytes_read(config, step, *(kv or (element_bytes,))) + states


def kv_bytes_read(config: ModelConfig, step: Step, element_bytes: int, scale_bytes: int = 0) -> int:
    """Keys and values that a step's tokens see: of a window only that, and what layers share once for each.
    scale_bytes: as `kv_bytes_per_token`."""
    mixers = [layer.mixer for layer in config.layers if not config.encoder]
    of_token = [
        elements_read_per_token(c) * element_bytes + vectors_read_per_token(c) * scale_bytes for c in mixers
    ]
    return sum(
        size * tokens_seen(c, share) * share.sequences
        for c, size in zip(mixers, of_token, strict=True)
        for share in step
    )


def expert_fraction_read(config: ModelConfig, tokens: int) -> float:
    """Of all experts' weights those that so many tokens of a step go to, if every expert is as likely as another:
    1 - (1 - k / E)^tokens. Routers that prefer some touch fewer."""
    mixtures = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoEConfig)]
    sizes = [c.experts * ffn_parameters(c.expert, config.hidden_size) for c in mixtures]
    shares = [1 - (1 - c.experts_per_token / c.experts) ** tokens for c in mixtures]
    touched = sum(size * share for size, share in zip(sizes, shares, strict=True))
    return touched / sum(sizes) if sizes else 0.0


def elements_read_per_token(c: Mixer) -> int:
    """How many numbers of a cached token a layer reads: those of another layer, too."""
    return 2 * c.kv_heads * c.head_dim if isinstance(c, AttentionConfig) else cached_elements(c)


def vectors_read_per_token(c: Mixer) -> int:
    """Of how many vectors those are."""
    return 2 * c.kv_heads if isinstance(c, AttentionConfig) else cached_vectors(c)


def tokens_seen(c: Mixer, share: SequenceStep) -> int:
    """Cached tokens that any of the share's tokens sees."""
    window = c.window if isinstance(c, AttentionConfig) else None
    return min(share.context, window + share.tokens - 1) if window else share.context


def query_key_pairs(c: Mixer, share: SequenceStep) -> int:
    """Of a query and a key that it sees."""
    window = c.window if isinstance(c, AttentionConfig) and c.window else share.context
    first = share.context - share.tokens + 1  # keys that the first query would see without a window
    growing = max(0, min(window, share.context) - first + 1)
    return growing * (2 * first + growing - 1) // 2 + (share.tokens - growing) * window


def flops(config: ModelConfig, step: Step) -> int:
    """Multiplications and additions of a step's matrix products: two a weight and token, attention, delta nets."""
    embedding = config.vocab_size * config.hidden_size
    outside = embedding * (1 if config.tie_embeddings or config.encoder else 2)
    if config.per_layer:
        outside += len(config.layers) * config.per_layer.dim
    of_token, mixers = active_parameter_count(config) - outside, [layer.mixer for layer in config.layers]

    def of_sequence(share: SequenceStep) -> int:
        products = 2 * (of_token * share.tokens + (0 if config.encoder else embedding * share.logits))
        return products + sum(mixer_flops(c, share) for c in mixers)

    return sum(of_sequence(share) * share.sequences for share in step)


def mixer_flops(c: Mixer, share: SequenceStep) -> int:
    """Of what a layer does with the tokens before, beside its weights."""
    match c:
        case AttentionConfig():
            return 4 * c.heads * c.head_dim * query_key_pairs(c, share)
        case LatentConfig():
            # Latents as keys, or keys and values made from them again, whichever is less (kernels/latent.py).
            absorbed = query_key_pairs(c, share) * (2 * c.kv_lora_rank + c.rope_dim)
            again = (share.context - share.tokens) * (c.nope_dim + c.value_dim) * c.kv_lora_rank
            expanded = again + query_key_pairs(c, share) * (c.nope_dim + c.rope_dim + c.value_dim)
            return 2 * c.heads * min(absorbed, expanded)
        case DeltaNetConfig():
            return 6 * math.prod(c.state_shape) * share.tokens  # S^T k, S^T q, and the correction
        case ShortConvConfig():
            return 0
