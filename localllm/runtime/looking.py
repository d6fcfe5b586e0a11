"""What a model computes on the way of a text: logits of every token, piece by piece, and the output of each layer.

For measuring, beside whatever else the engine does; to be called on the engine's thread alone.
"""

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.cache import LayerCache
from localllm.runtime.engine import Engine
from localllm.runtime.model import Layer
from localllm.runtime.state import SequenceState
from localllm.runtime.texts import Texts


def logits_in_pieces(engine: Engine, token_ids: Sequence[int], rows: int) -> Generator[Tensor]:
    """[rows, vocab] float32 after each other, the last maybe shorter; the caller must not change them.

    Raises OutOfBlocks where the cache has no room for the tokens.
    """
    state = SequenceState(engine.pool)
    try:
        for begin in range(0, len(token_ids), rows):
            piece = list(token_ids[begin : begin + rows])
            state.extend(len(piece))
            every = list(range(len(piece)))
            yield engine.runner.launch(
                Batch.of([state], [piece], every, engine.runner.device, engine.pool.drain_copies())
            )
    finally:
        state.free()


def layer_outputs(engine: Engine, token_ids: Sequence[int]) -> list[Tensor]:
    """[T, hidden] float32 of each layer, on the CPU."""
    model, outputs = engine.runner.model, []
    layers = model.layers
    watched: list[Layer] = [Watched(layer, lambda x: outputs.append(x.float().cpu())) for layer in layers]
    model.layers = watched
    try:
        engine.logits(list(token_ids))
    finally:
        model.layers = layers
    return outputs


class Watched(Layer):
    """A layer, with the same weights, whose output is shown."""

    def __init__(self, layer: Layer, show: Callable[[Tensor], None]):
        vars(self).update(vars(layer))
        self.show = show

    def __call__(
        self, x: Tensor, batch: Batch | Texts, cache: LayerCache | None, token_input: Tensor | None
    ) -> Tensor:
        x = super().__call__(x, batch, cache, token_input)
        self.show(x)
        return x
