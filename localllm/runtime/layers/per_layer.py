"""Per-layer embeddings: what each layer adds per token besides mixer and feed-forward (Gemma 3n and 4)."""

import torch
from torch import Tensor

from localllm.arch.config import Activation, ModelConfig, PerLayerConfig
from localllm.arch.layout import PER_LAYER_TABLE
from localllm.runtime import kernels
from localllm.runtime.layers.linear import Embedding, Linear
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.weight_source import WeightSource


class PerLayerInputs:
    """(table[token] * sqrt(dim) + norm(W x / sqrt(hidden))) / sqrt(2), for all layers at once."""

    def __init__(self, config: PerLayerConfig, model: ModelConfig, source: WeightSource):
        self.layer_count = model.stage.total if model.stage else len(model.layers)
        width = self.layer_count * config.dim
        self.table = Embedding(source, PER_LAYER_TABLE, config.vocab_size, width, as_stored=True)
        # Rounded to the model's dtype, as in training.
        self.table_scale = torch.tensor(config.dim**0.5, dtype=source.dtype).item()
        self.projection = Linear.load(source, {"per_layer_model_projection": width}, model.hidden_size, bias=False)
        self.projection_scale = model.hidden_size**-0.5
        self.norm = load_norm(source, "per_layer_projection_norm", config.dim, model)

    def __call__(self, token_ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs [T, dim] of each layer. token_ids: [T]; x: [T, hidden], their embeddings"""
        from_table = self.table(token_ids).unflatten(-1, (self.layer_count, -1)) * self.table_scale
        from_embedding = self.norm(
            (self.projection(x) * self.projection_scale).unflatten(-1, (self.layer_count, -1))
        )
        return ((from_embedding + from_table) * 2**-0.5).unbind(1)


class PerLayerGate:
    """norm(V (activation(U x) * input))"""

    def __init__(self, config: PerLayerConfig, model: ModelConfig, source: WeightSource):
        self.activation: Activation = config.activation
        self.gate = Linear.load(source, {"per_layer_input_gate": config.dim}, model.hidden_size, bias=False)
        self.projection = Linear.load(source, {"per_layer_projection": model.hidden_size}, config.dim, bias=False)
        self.norm = load_norm(source, "post_per_layer_input_norm", model.hidden_size, model)

    def __call__(self, x: Tensor, token_input: Tensor) -> Tensor:
        """Gate and project the layer's input. x: [T, hidden]; token_input: [T, dim] -> [T, hidden]"""
        return self.norm(
            self.projection(kernels.gated_activation(torch.cat((self.gate(x), token_input), -1), self.activation))
        )
