"""The decoder: embed, layers, norm, logits. No family names here; everything comes from ModelConfig."""

from torch import Tensor

from localllm.arch.config import LayerConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.cache import KVCache
from localllm.runtime.layers.attention import Attention
from localllm.runtime.layers.ffn import MLP
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.rope import Rope
from localllm.runtime.load import Source


class Layer:
    def __init__(self, config: LayerConfig, model: ModelConfig, source: Source):
        hidden, self.eps = model.hidden_size, model.norm_eps
        self.rope = config.mixer.rope
        self.before_mixer = source.tensor("input_layernorm.weight", hidden)
        self.before_ffn = source.tensor("post_attention_layernorm.weight", hidden)
        self.mixer = Attention(config.mixer, hidden, self.eps, source.under("self_attn"))
        self.ffn = MLP(config.ffn, hidden, source.under("mlp"))

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.mixer(kernels.rms_norm(x, self.before_mixer, self.eps), batch, cache, angles)
        return x + self.ffn(kernels.rms_norm(x, self.before_ffn, self.eps))


class Decoder:
    """Takes its weights from `source` and leaves none behind: a leftover raises DamagedModel."""

    def __init__(self, config: ModelConfig, source: Source):
        self.config = config
        body = source.under("model")
        self.embedding = body.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [Layer(c, config, body.under(f"layers.{i}")) for i, c in enumerate(config.layers)]
        self.norm = body.tensor("norm.weight", config.hidden_size)
        head = {"lm_head": config.vocab_size}
        if config.tie_embeddings:
            self.head = Linear(self.embedding)
        else:
            self.head = Linear.load(source, head, config.hidden_size, bias=False)
        self.ropes = {rope: Rope(rope, source.device) for rope in {layer.mixer.rope for layer in config.layers}}
        # Some writers store a tied head twice, and old ones the rope frequencies: neither is read.
        tied = ["lm_head.weight"] if config.tie_embeddings else []
        frequencies = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(config.layers))]
        source.weights.finish(expected=[*tied, *frequencies])

    def __call__(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        """Appends the batch's tokens to the caches -> logits [N, vocab] in the model's dtype."""
        angles = {rope: table.angles(batch.positions) for rope, table in self.ropes.items()}
        x = self.embedding[batch.token_ids]  # [T, hidden]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, cache, angles[layer.rope])
        return self.head(kernels.rms_norm(x[batch.logit_index], self.norm, self.config.norm_eps))
