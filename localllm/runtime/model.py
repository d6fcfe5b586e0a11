"""Decoder and Encoder, built from a ModelConfig. There are no model family names here.

The encoder turns whole texts into one vector per token. Its layers are the decoder's, with attention within each
text; it has no KV cache.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import LayerConfig, ModelConfig, Stage, ropes_of
from localllm.errors import UnsupportedModel
from localllm.runtime import kernels
from localllm.runtime.batch import Batch, EncoderBatch
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.kv_cache.tensors import LayerCache
from localllm.runtime.layers.ffn import MoE, load_ffn
from localllm.runtime.layers.linear import Embedding, Linear
from localllm.runtime.layers.mixer import Attention, ShortConv, load_mixer
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.layers.per_layer import PerLayerGate, PerLayerInputs
from localllm.runtime.layers.rope import Rope
from localllm.runtime.weight_source import WeightSource


class Layer:
    """x + mixer(norm(x)), then x + ffn(norm(x)), with norms where the LayerConfig puts them."""

    def __init__(self, config: LayerConfig, model: ModelConfig, source: WeightSource):
        def norm(name: str, present: bool) -> Norm | None:
            return load_norm(source, name, model.hidden_size, model) if present else None

        self.config = config
        self.is_post_norm = model.encoder is not None and model.encoder.norms_of_sums
        self.before_mixer = norm("before_mixer", config.norms.before_mixer)
        self.after_mixer = norm("after_mixer", config.norms.after_mixer)
        self.before_ffn = norm("before_ffn", config.norms.before_ffn)
        self.after_ffn = norm("after_ffn", config.norms.after_ffn)
        self.mixer = load_mixer(config.mixer, model, source)
        self.ffn = load_ffn(config.ffn, model, source.under("mlp"))
        self.per_layer_gate = PerLayerGate(model.per_layer, model, source) if model.per_layer else None
        self.output_scale = source.float32_tensor("layer_scalar", 1).item() if config.output_scale else 1.0
        # With several ranks, a product is complete only after their sum.
        fuses_norms = kernels.prepares_norms() and source.tensor_ranks is None
        self.prepares_norms = fuses_norms and not config.parallel and not isinstance(self.ffn, MoE)
        self.next_norm: Norm | None = None

    def prepare_norm_of(self, following: "Layer") -> None:
        """Let the last product prepare the norm before the mixer of the following layer, if its input is the
        product's result, and only a product reads the norm.
        """
        changed = self.per_layer_gate is not None or self.output_scale != 1.0
        fused = isinstance(following.mixer, Attention | ShortConv) and not following.config.parallel
        if self.prepares_norms and fused and not changed:
            self.next_norm = following.before_mixer

    def __call__(
        self,
        x: Tensor,
        batch: Batch | EncoderBatch,
        cache: LayerCache | None,
        token_input: Tensor | None,
        norm: Norm | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Compute the layer.

        x: [T, hidden]; token_input: [T, dim] for models with per-layer inputs; norm: before the mixer, if the
        previous layer has prepared it; following: of the result, if `next_norm` is set -> [T, hidden]
        """
        if self.config.parallel:
            normed = self.before_mixer(x) if self.before_mixer else x
            mixed = self.add_residual(x, self.after_mixer, partial(self.mixer, normed, batch, cache, None))
            return self.add_residual(mixed, self.after_ffn, partial(self.ffn, normed, self.before_ffn))
        middle = FollowingNorm(self.before_ffn) if self.prepares_norms and self.before_ffn else None
        mix = partial(self.mixer, x, batch, cache, norm or self.before_mixer)
        x = self.add_residual(x, self.after_mixer, mix, middle)
        ffn = partial(self.ffn, x, middle.of(x) if middle else self.before_ffn)
        x = self.add_residual(x, self.after_ffn, ffn, following)
        if self.per_layer_gate and token_input is not None:
            x = x + self.per_layer_gate(x, token_input)
        return scale_by(x, self.output_scale)

    def add_residual(
        self, x: Tensor, norm: Norm | None, compute: Callable[..., Tensor], following: FollowingNorm | None = None
    ) -> Tensor:
        """Return x + norm(part) * residual_scale.

        Without a norm or scale, `compute` itself adds its argument x, and may prepare the norm that follows.
        """
        if norm is None and self.config.residual_scale == 1.0:
            return compute(x, following) if following else compute(x)
        if self.is_post_norm and norm:
            return norm(compute(x))
        y, scale = compute(None), self.config.residual_scale
        return kernels.add_norm(x, y, norm, scale) if norm else x + scale_by(y, scale)


def scale_by(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, without an operation if the factor is 1."""
    return x if factor == 1.0 else x * factor


def round_scale(dtype: torch.dtype, scale: float) -> float:
    """Round a scale to the model's dtype, as in training (Gemma's is 55.5 in bfloat16, not 55.4256)."""
    return torch.tensor(scale, dtype=dtype).item()


class Decoder:
    """A decoder: embed, layers, norm, logits.

    Takes its weights from `source` and raises DamagedModel if any are left over. max_len: maximum tokens of a
    sequence. A stage of a pipeline has some of the layers, and only the first one has the rest.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, max_len: int):
        self.config = config
        self.dtype = source.dtype
        self.device = source.device
        self.ranks = source.ranks
        if config.has_ends:
            self.load_embedding(source)
        self.layers: list[Layer] = []
        for i, c in enumerate(config.layers, config.stage.first if config.stage else 0):
            self.layers.append(Layer(c, config, source.under(f"layers.{i}")))
            source.weights.release()
        for layer, next_layer in pairwise(self.layers):
            layer.prepare_norm_of(next_layer)
        if config.has_ends:
            self.load_head(source)
        self.set_max_len(max_len, source.device)
        source.weights.release()
        # Some checkpoints store a tied head twice.
        source.weights.finish(expected=["lm_head.weight"] if config.tie_embeddings else [])

    def load_embedding(self, source: WeightSource) -> None:
        config = self.config
        self.embedding = Embedding(
            source, "embed_tokens", config.vocab_size, config.hidden_size, checked=not self.head_on_cpu
        )
        self.embedding_scale = round_scale(source.dtype, config.embedding_scale)
        self.per_layer = PerLayerInputs(config.per_layer, config, source) if config.per_layer else None

    def load_head(self, source: WeightSource) -> None:
        config = self.config
        self.norm = load_norm(source, "norm", config.hidden_size, config)
        if config.tie_embeddings:
            self.lm_head = Linear(
                self.embedding.weight,
                dtype=source.dtype,
                on_read=source.weights.release,
                activation_bits=source.activation_bits,
            )
            [head] = self.lm_head.weights
            if self.head_on_cpu:
                source.check_laid_out(["embed_tokens"], [self.embedding.weight], [head])
                self.embedding.weight = head  # for lookups, too: none of the mapped file stays in memory
            source.keep_matrices({"embed_tokens": self.embedding.rows}, self.lm_head.weights)
        else:
            self.lm_head = Linear.load(source, {"lm_head": self.embedding.rows}, config.hidden_size, bias=False)

    @property
    def head_on_cpu(self) -> bool:
        """Whether a CPU has the head in the embedding's place."""
        return self.config.tie_embeddings and self.device.type == "cpu"

    def set_max_len(self, max_len: int, device: torch.device) -> None:
        """Set the maximum tokens of a sequence, which some rotary embeddings depend on.

        No sequence may have begun.
        """
        self.max_len = max_len
        self.ropes = {rope: Rope(rope, max_len, device) for rope in ropes_of(self.config.layers)}

    def __call__(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Append the batch's tokens to the caches and return logits [N, vocab] in the model's dtype.

        Of several ranks, only the first returns the logits of the whole vocabulary, and stages behind the first
        return what they have computed.
        """
        selected = self.hidden_states(batch, caches, batch.logit_index)
        return self.logits(selected) if self.config.has_ends else selected

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, vocab] of hidden states [N, hidden] before the norm."""
        c = self.config
        logits = self.lm_head(hidden, norm=self.norm)
        if self.ranks and self.ranks.shard.size > 1:
            if rows_left := self.ranks.shard.vocab_rows(c.vocab_size) - logits.shape[1]:
                logits = F.pad(logits, (0, rows_left))
            logits = self.ranks.gather_columns(logits)[:, : c.vocab_size]
        logits = scale_by(logits, c.logit_scale)
        return c.logit_softcap * kernels.tanh(logits / c.logit_softcap) if c.logit_softcap else logits

    def normed_hidden_states(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Append the batch's tokens to the caches and return the head's input of all of them: [T, hidden]."""
        x = self.hidden_states(batch, caches)
        return self.norm(x) if self.config.has_ends else x

    def hidden_states(self, batch: Batch, caches: list[LayerCache], index: Tensor | None = None) -> Tensor:
        """Append the batch's tokens to the caches and return the last layer's output before the norm: [N, hidden],
        of the tokens in `index` or of all.
        """
        x = self.run_layers(batch, caches, index)
        if self.config.stage and self.config.has_ends:
            return self.receive_back(len(x) if index is None else len(index))
        return x

    def run_layers(self, batch: Batch, caches: list[LayerCache], index: Tensor | None = None) -> Tensor:
        """Append the batch's tokens to the caches of the own layers, and return their output: [N, hidden]
        as in `hidden_states`. A stage sends it to the next one.
        """
        batch.rope_angles.update({rope: table.angles(batch.positions) for rope, table in self.ropes.items()})
        x, token_inputs = self.embed(batch.token_ids) if self.config.has_ends else self.receive(batch.token_ids)
        norm = None
        for layer, cache, token_input in zip(self.layers, caches, token_inputs, strict=False):
            following = FollowingNorm(layer.next_norm) if layer.next_norm else None
            x = layer(x, batch, cache, token_input, norm, following)
            norm = following.of(x) if following else None
        if self.config.stage:
            return self.pass_on(self.config.stage, x, token_inputs[len(self.layers) :], index)
        return x if index is None else x[index]

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the embeddings [T, hidden], and the inputs of all layers besides."""
        x = scale_by(self.embedding(token_ids), self.embedding_scale)
        return x, self.per_layer(token_ids, x) if self.per_layer else [None] * len(self.layers)

    def receive(self, token_ids: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return what the previous stage has sent: its output [T, hidden], and the inputs of the remaining
        layers."""
        c, stage, ranks = self.config, self.config.stage, self.ranks
        assert stage and ranks
        widths = [c.hidden_size]
        if c.per_layer:
            widths += [c.per_layer.dim] * (stage.total - stage.first)
        sent = torch.empty(len(token_ids), sum(widths), dtype=self.dtype, device=self.device)
        x, *inputs = ranks.receive_from_previous_stage(sent).split(widths, -1)
        return x.contiguous(), inputs or [None] * len(self.layers)

    def pass_on(
        self, stage: Stage, x: Tensor, token_inputs: Sequence[Tensor | None], index: Tensor | None
    ) -> Tensor:
        """Send a stage's output to the next one, and return it.

        token_inputs: of the layers of following stages; index: of the tokens whose hidden states are needed
        """
        assert self.ranks
        if stage.is_last:  # sends something even if nothing is needed: see `receive_back`
            x = x if index is None else x[index] if len(index) else x[:1]
        self.ranks.send_to_next_stage(torch.cat((x, *(each for each in token_inputs if each is not None)), -1))
        return x

    def receive_back(self, count: int) -> Tensor:
        """Return what the last stage sends to the first one after a step: [count, hidden].

        The first stage waits for it even if it needs nothing, so that it knows which steps are in flight.
        """
        assert self.ranks
        shape = max(1, count), self.config.hidden_size
        returned = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.ranks.receive_from_previous_stage(returned)[:count]


class Encoder:
    """An encoder, which takes its weights from `source`. max_len: maximum tokens of a text."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_len: int):
        c, hidden = config.encoder, config.hidden_size
        if c is None:
            raise UnsupportedModel("this model generates tokens, not embeddings", "load it as an LLM")
        self.config = config
        self.dtype = source.dtype
        self.embedding = Embedding(source, "embed_tokens", config.vocab_size, hidden)
        self.positions = source.tensor("embed_positions.weight", c.positions, hidden) if c.positions else None
        token_types = source.tensor("embed_kinds.weight", c.token_types, hidden) if c.token_types else None
        self.token_type = None if token_types is None else token_types[0].clone()
        self.embedding_norm = load_norm(source, "embed_norm", hidden, config) if c.embedding_norm else None
        self.layers: list[Layer] = []
        for i, layer in enumerate(config.layers):
            self.layers.append(Layer(layer, config, source.under(f"layers.{i}")))
            source.weights.release()
        self.norm = load_norm(source, "norm", hidden, config) if c.final_norm else None
        self.first_position = c.first_position
        self.embedding_scale = round_scale(source.dtype, config.embedding_scale)
        self.ropes = {rope: Rope(rope, max_len, source.device) for rope in ropes_of(config.layers)}

    def __call__(self, batch: EncoderBatch) -> Tensor:
        """Return [T, hidden] in the model's dtype."""
        batch.rope_angles.update({rope: table.angles(batch.positions) for rope, table in self.ropes.items()})
        x = scale_by(self.embedding(batch.token_ids), self.embedding_scale)
        if self.positions is not None:
            x = x + self.positions[batch.positions + self.first_position]
        x = x if self.token_type is None else x + self.token_type
        x = self.embedding_norm(x) if self.embedding_norm else x
        for layer in self.layers:
            x = layer(x, batch, None, None)
        return self.norm(x) if self.norm else x
