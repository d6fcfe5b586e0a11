"""What a model computes on the way of a text: logits of every token, piece by piece, and the output of each layer.

For measuring, beside whatever else the engine does; to be called on the engine's thread alone.
"""

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from localllm.runtime.batch import Batch, EncoderBatch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.kv_cache.tensors import LayerCache
from localllm.runtime.model import Layer


def stream_logits(engine: Engine, token_ids: Sequence[int], chunk_len: int) -> Generator[Tensor]:
    """[rows, vocab] float32 after each other, the last maybe shorter; the caller must not change them.

    Raises OutOfBlocks where the cache has no room for the tokens.
    """
    state = SequenceState(engine.pool)
    try:
        for begin in range(0, len(token_ids), chunk_len):
            piece = list(token_ids[begin : begin + chunk_len])
            state.extend(len(piece))
            every = list(range(len(piece)))
            yield engine.runner.launch(
                Batch.from_states([state], [piece], every, engine.runner.device, engine.pool.drain_copies())
            )
    finally:
        state.free()


def capture_layer_outputs(engine: Engine, token_ids: Sequence[int]) -> list[Tensor]:
    """[T, hidden] float32 of each layer, on the CPU."""
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
    """A layer, with the same weights, whose output is shown."""

    def __init__(self, layer: Layer, on_output: Callable[[Tensor], None]):
        vars(self).update(vars(layer))
        self.on_output = on_output

    def __call__(
        self, x: Tensor, batch: Batch | EncoderBatch, cache: LayerCache | None, token_input: Tensor | None
    ) -> Tensor:
        x = super().__call__(x, batch, cache, token_input)
        self.on_output(x)
        return x
