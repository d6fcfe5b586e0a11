"""Intermediate results of a model, for measurements: logits of every token, and the output of each layer.

They run beside the engine's other work and must be called on the engine's thread.
"""

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from localllm.runtime.batch import Batch, EncoderBatch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.kv_cache.tensors import LayerCache
from localllm.runtime.model import Layer


def stream_logits(engine: Engine, token_ids: Sequence[int], chunk_len: int) -> Generator[Tensor]:
    """Yield logits [chunk, vocab] float32 chunk by chunk; the last chunk may be shorter. Do not modify them.

    Raises OutOfBlocks if the KV cache has too few free blocks for the tokens.
    """
    state = SequenceState(engine.pool)
    try:
        for begin in range(0, len(token_ids), chunk_len):
            chunk = list(token_ids[begin : begin + chunk_len])
            state.extend(len(chunk))
            all_indices = list(range(len(chunk)))
            yield engine.runner.launch(
                Batch.from_states([state], [chunk], all_indices, engine.runner.device, engine.pool.drain_copies())
            )
    finally:
        state.free()


def capture_layer_outputs(engine: Engine, token_ids: Sequence[int]) -> list[Tensor]:
    """Return the output [T, hidden] float32 of each layer, on the CPU."""
    model, outputs = engine.runner.model, []
    layers = model.layers
    watched: list[Layer] = [ObservedLayer(layer, lambda x: outputs.append(x.float().cpu())) for layer in layers]
    model.layers = watched
    try:
        engine.logits(list(token_ids))
    finally:
        model.layers = layers
    return outputs


class ObservedLayer(Layer):
    """A layer with the same weights that reports its output."""

    def __init__(self, layer: Layer, on_output: Callable[[Tensor], None]):
        vars(self).update(vars(layer))
        self.on_output = on_output

    def __call__(
        self, x: Tensor, batch: Batch | EncoderBatch, cache: LayerCache | None, token_input: Tensor | None
    ) -> Tensor:
        x = super().__call__(x, batch, cache, token_input)
        self.on_output(x)
        return x
