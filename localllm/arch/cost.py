"""What a model costs, from its description alone: `load` sizes the cache by it, the benchmark names its size."""

from localllm.arch.config import AttentionConfig, MLPConfig, ModelConfig


def parameters(config: ModelConfig) -> int:
    """How many weights the model has; a tied head counts once."""
    embedding = config.vocab_size * config.hidden_size
    layers = sum(
        attention_parameters(layer.mixer, config.hidden_size)
        + mlp_parameters(layer.ffn, config.hidden_size)
        + 2 * config.hidden_size
        for layer in config.layers
    )
    return embedding * (1 if config.tie_embeddings else 2) + layers + config.hidden_size


def attention_parameters(c: AttentionConfig, hidden: int) -> int:
    queries, keys = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    weights = hidden * (queries + keys) + queries * hidden
    biases = c.qkv_bias * (queries + keys) + c.out_bias * hidden
    return weights + biases + c.qk_norm * 2 * c.head_dim


def mlp_parameters(c: MLPConfig, hidden: int) -> int:
    return 3 * hidden * c.intermediate_size + c.bias * (2 * c.intermediate_size + hidden)


def kv_bytes_per_token(config: ModelConfig, element_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return sum(2 * layer.mixer.kv_heads * layer.mixer.head_dim * element_bytes for layer in config.layers)
