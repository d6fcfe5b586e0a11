"""The encoder: tokens of whole texts -> a vector of each token. No family names; all comes from ModelConfig.

Its layers are the decoder's, with attention within the texts; it keeps no keys and values.
"""

from torch import Tensor

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.errors import UnsupportedModel
from localllm.runtime.layers.embedding import Embedding
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.layers.rope import Rope
from localllm.runtime.model import Layer, round_scale, scale_by
from localllm.runtime.texts import EncoderBatch
from localllm.runtime.weight_source import WeightSource


class Encoder:
    """Takes its weights from `source`. `max_len`: the longest text, in tokens."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_len: int):
        c, hidden = config.encoder, config.hidden_size
        if c is None:
            raise UnsupportedModel("this model gives tokens, not vectors", "load it as an LLM")
        self.config = config
        self.dtype = source.dtype
        self.embedding = Embedding(source, "embed_tokens", config.vocab_size, hidden)
        self.positions = source.tensor("embed_positions.weight", c.positions, hidden) if c.positions else None
        kinds = source.tensor("embed_kinds.weight", c.token_types, hidden) if c.token_types else None
        self.token_type = None if kinds is None else kinds[0].clone()
        self.embedding_norm = load_norm(source, "embed_norm", hidden, config) if c.embedding_norm else None
        self.layers: list[Layer] = []
        for i, layer in enumerate(config.layers):
            self.layers.append(Layer(layer, config, source.under(f"layers.{i}")))
            source.weights.release()
        self.norm = load_norm(source, "norm", hidden, config) if c.final_norm else None
        self.first_position = c.first_position
        self.embedding_scale = round_scale(source.dtype, config.embedding_scale)
        mixers = [layer.mixer for layer in config.layers]
        ropes = {c.rope for c in mixers if isinstance(c, AttentionConfig) and c.rope}
        self.ropes = {rope: Rope(rope, max_len, source.device) for rope in ropes}

    def __call__(self, batch: EncoderBatch) -> Tensor:
        """-> [T, hidden] in the model's dtype"""
        batch.rope_angles.update({rope: table.angles(batch.positions) for rope, table in self.ropes.items()})
        x = scale_by(self.embedding(batch.token_ids), self.embedding_scale)
        if self.positions is not None:
            x = x + self.positions[batch.positions + self.first_position]
        x = x if self.token_type is None else x + self.token_type
        x = self.embedding_norm(x) if self.embedding_norm else x
        for layer in self.layers:
            x = layer(x, batch, None, None)
        return self.norm(x) if self.norm else x
