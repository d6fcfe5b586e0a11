"""The decoder: embed, layers, norm, logits. No family names here; everything comes from ModelConfig."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, LatentConfig, LayerConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.cache import LayerCache
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.layers.embedding import Embedding
from localllm.runtime.layers.ffn import load_ffn
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.mixer import load_mixer
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.layers.per_layer import PerLayerGate, PerLayerInputs
from localllm.runtime.layers.rope import Rope
from localllm.runtime.load import Source


class Layer:
    """x + mixer(norm(x)), then x + ffn(norm(x)); where the norms stand, its config says."""

    def __init__(self, config: LayerConfig, model: ModelConfig, source: Source):
        def norm(name: str, there: bool) -> Norm | None:
            return load_norm(source, name, model.hidden_size, model) if there else None

        self.config = config
        self.before_mixer = norm("before_mixer", config.norms.before_mixer)
        self.after_mixer = norm("after_mixer", config.norms.after_mixer)
        self.before_ffn = norm("before_ffn", config.norms.before_ffn)
        self.after_ffn = norm("after_ffn", config.norms.after_ffn)
        self.mixer = load_mixer(config.mixer, model, source)
        self.ffn = load_ffn(config.ffn, model, source.under("mlp"))
        self.gate = PerLayerGate(model.per_layer, model, source) if model.per_layer else None
        self.output_scale = source.exact("layer_scalar", 1).item() if config.output_scale else 1.0

    def __call__(self, x: Tensor, batch: Batch, cache: LayerCache, token_input: Tensor | None) -> Tensor:
        """x: [T, hidden]; token_input: [T, dim], of models with per-layer inputs -> [T, hidden]"""
        if self.config.parallel:
            normed = self.before_mixer(x) if self.before_mixer else x
            mixed = self.added(x, self.after_mixer, partial(self.mixer, normed, batch, cache, None))
            return self.added(mixed, self.after_ffn, partial(self.ffn, normed, self.before_ffn))
        x = self.added(x, self.after_mixer, partial(self.mixer, x, batch, cache, self.before_mixer))
        x = self.added(x, self.after_ffn, partial(self.ffn, x, self.before_ffn))
        if self.gate and token_input is not None:
            x = x + self.gate(x, token_input)
        return scaled(x, self.output_scale)

    def added(self, x: Tensor, after: Norm | None, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        """x + after(part) * residual_scale; `part` itself adds what it is given, where nothing stands between."""
        if after is None and self.config.residual_scale == 1.0:
            return part(x)
        y, scale = part(None), self.config.residual_scale
        return kernels.add_normed(x, y, after, scale) if after else x + scaled(y, scale)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Most models scale nothing: no operation then."""
    return x if factor == 1.0 else x * factor


class Decoder:
    """Takes its weights from `source` and leaves none behind: a leftover raises DamagedModel.

    `context`: the longest that a sequence may become, in tokens.
    """

    def __init__(self, config: ModelConfig, source: Source, context: int):
        self.config = config
        self.dtype = source.dtype
        self.embedding = Embedding(source, "embed_tokens", config.vocab_size, config.hidden_size)
        self.per_layer = PerLayerInputs(config.per_layer, config, source) if config.per_layer else None
        self.layers: list[Layer] = []
        for i, c in enumerate(config.layers):
            self.layers.append(Layer(c, config, source.under(f"layers.{i}")))
            source.weights.let_go()
        self.norm = load_norm(source, "norm", config.hidden_size, config)
        if config.tie_embeddings:
            self.head = Linear(self.embedding.weight, dtype=source.dtype, between=source.weights.let_go)
        else:
            self.head = Linear.load(source, {"lm_head": config.vocab_size}, config.hidden_size, bias=False)
        # In the model's dtype, as it was trained (Gemma's is 55.5 in bfloat16, not 55.4256).
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=source.dtype).item()
        self.resize(context, source.device)
        source.weights.let_go()
        # Some writers store a tied head twice.
        source.weights.finish(expected=["lm_head.weight"] if config.tie_embeddings else [])

    def resize(self, context: int, device: torch.device) -> None:
        """Sequences may become so long from now on, none of which has begun: some models rotate by that."""
        mixers = [layer.mixer for layer in self.config.layers]
        attending = [c for c in mixers if isinstance(c, AttentionConfig | LatentConfig)]
        self.ropes = {c.rope: Rope(c.rope, context, device) for c in attending if c.rope}

    def __call__(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Appends the batch's tokens to the caches -> logits [N, vocab] in the model's dtype."""
        c = self.config
        batch.angles.update({rope: table.angles(batch.positions) for rope, table in self.ropes.items()})
        x = scaled(self.embedding(batch.token_ids), self.embedding_scale)  # [T, hidden]
        token_inputs = self.per_layer(batch.token_ids, x) if self.per_layer else [None] * len(self.layers)
        for layer, cache, token_input in zip(self.layers, caches, token_inputs, strict=True):
            x = layer(x, batch, cache, token_input)
        wanted = x if batch.logit_index is None else x[batch.logit_index]
        logits = scaled(self.head(wanted, norm=self.norm), c.logit_scale)
        return c.logit_softcap * kernels.tanh(logits / c.logit_softcap) if c.logit_softcap else logits
