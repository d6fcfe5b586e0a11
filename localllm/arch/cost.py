"""What a model costs, from its description alone: `load` sizes the cache by it, the benchmark names its size."""

import math

from localllm.arch.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    LayerConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RecurrentConfig,
    ShortConvConfig,
)

MATRIX_BYTES = 4  # what a delta net remembers is summed up over thousands of tokens: float32


def parameters(config: ModelConfig) -> int:
    """How many weights the model has; a tied head counts once."""
    embedding = config.vocab_size * config.hidden_size
    layers = sum(layer_parameters(layer, config.hidden_size) for layer in config.layers)
    outside = embedding * (1 if config.tie_embeddings else 2) + config.hidden_size
    return outside + layers + per_layer_parameters(config)


def per_layer_parameters(config: ModelConfig) -> int:
    """Of the table and the projection beside it, and of all layers' gates."""
    if config.per_layer is None:
        return 0
    c, hidden, layers = config.per_layer, config.hidden_size, len(config.layers)
    return (c.vocab_size + hidden) * layers * c.dim + c.dim + layers * (2 * hidden * c.dim + hidden)


def active_parameters(config: ModelConfig) -> int:
    """How many of them one token meets: of a mixture only the chosen experts, of a per-layer table one row."""
    mixtures = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoEConfig)]
    passed_over = sum(
        (c.experts - c.experts_per_token) * ffn_parameters(c.expert, config.hidden_size) for c in mixtures
    )
    if config.per_layer:
        passed_over += (config.per_layer.vocab_size - 1) * len(config.layers) * config.per_layer.dim
    return parameters(config) - passed_over


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
            return weights + c.channels * c.kernel + 2 * c.value_heads + c.value_dim
        case ShortConvConfig():
            return 4 * hidden * hidden + c.channels * c.kernel + c.bias * (4 * hidden + c.channels)


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
    return 3 * hidden * c.intermediate_size + c.bias * (2 * c.intermediate_size + hidden)


def kv_bytes_per_token(config: ModelConfig, element_bytes: int) -> int:
    """Keys and values of one token in all layers that attend."""
    return sum(cached_values(layer.mixer) for layer in config.layers) * element_bytes


def cached_values(c: Mixer) -> int:
    """How many numbers the cache of one layer holds for a token."""
    match c:
        case AttentionConfig():
            return 0 if c.kv_source is not None else 2 * c.kv_heads * c.head_dim
        case LatentConfig():
            return c.kv_lora_rank + c.rope_dim
        case _:
            return 0  # it keeps a state instead


def state_bytes(config: ModelConfig, element_bytes: int) -> int:
    """What all recurrent layers keep of one sequence, however long it is; 0 for a model without any."""
    mixers = [layer.mixer for layer in config.layers]
    return sum(
        (c.kernel - 1) * c.channels * element_bytes + bool(c.matrix) * math.prod(c.matrix) * MATRIX_BYTES
        for c in mixers
        if isinstance(c, RecurrentConfig)
    )
