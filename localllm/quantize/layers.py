"""One layer at a time over the calibration text: runtime's own layers, with an ear at every product.

All windows have one length and stand at positions 0 to T - 1, so that one batch serves them all. Computes in
float32.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, LatentConfig, ModelConfig
from localllm.arch.cost import state_bytes
from localllm.checkpoint.header import Header
from localllm.checkpoint.safetensors import Weights
from localllm.plan.memory import BLOCK_SIZE
from localllm.quantize.held import Held, Holding
from localllm.runtime.batch import Batch
from localllm.runtime.cache import LayerCache, RecurrentCache, make_caches
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.layers.embedding import Embedding
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.per_layer import PerLayerInputs
from localllm.runtime.layers.rope import Rope
from localllm.runtime.load import Source
from localllm.runtime.model import Layer, scaled
from localllm.runtime.state import BlockPool, SequenceState

CPU = torch.device("cpu")
LAYERS = "localllm.runtime.layers."
See = Callable[[Tensor], Tensor]


class Watched:
    """A Linear whose inputs somebody sees, and may round."""

    def __init__(self, linear: Linear, see: See):
        self.linear = linear
        self.see = see

    def __call__(self, x: Tensor, norm: Norm | None = None, **behind: Any) -> Tensor:
        return self.linear(self.see(norm(x) if norm else x), **behind)


def build(
    header: Header, config: ModelConfig, index: int, holding: Holding, dtype: torch.dtype, stack: bool
) -> Layer:
    """The layer of this number, of what `holding` holds and otherwise of the file. Raises as `Source`."""
    holding.joined.clear()
    source = Held(Weights(header), CPU, dtype, holding, stack)
    return Layer(config.layers[index], config, source.under(f"layers.{index}"))


def watch(part: Any, joined: dict[int, tuple[str, ...]], ear: Callable[[tuple[str, ...]], See | None]) -> None:
    """Puts an ear at each Linear below `part` for which `ear` of its matrices' names gives one."""
    for owner, attribute, linear in linears(part):
        see = ear(joined[id(linear.weights[0])])
        if see is not None:
            setattr(owner, attribute, Watched(linear, see))


def linears(part: Any) -> Iterator[tuple[Any, str, Linear]]:
    """Whose they are, under which attribute."""
    for attribute, value in list(vars(part).items()):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Linear):
                yield part, attribute, each
            elif type(each).__module__.startswith(LAYERS):
                yield from linears(each)


class Stream:
    """The hidden states of all windows between two layers.

    ids: [windows, T] int64; hidden: [windows, T, hidden] float32; shared: keys and values that later layers
    read, by layer and window.
    """

    def __init__(self, header: Header, config: ModelConfig, ids: Tensor):
        self.config = config
        self.ids = ids
        windows, length = ids.shape
        source = Source(Weights(header), CPU, torch.float32)
        self.embedding = Embedding(source, "embed_tokens", config.vocab_size, config.hidden_size, as_stored=True)
        self.per_layer = PerLayerInputs(config.per_layer, config, source) if config.per_layer else None
        self.blocks = -(-length // BLOCK_SIZE)
        self.batch = one_batch(config, length, self.blocks)
        self.read_by_others = {c.kv_source for c in self.mixers if isinstance(c, AttentionConfig)} - {None}
        self.shared: dict[int, list[LayerCache]] = {}
        self.hidden = torch.empty(windows, length, config.hidden_size)
        for window in range(windows):
            self.hidden[window] = self.embedded(window)

    @property
    def mixers(self) -> list[Any]:
        return [layer.mixer for layer in self.config.layers]

    def embedded(self, window: int) -> Tensor:
        return scaled(self.embedding(self.ids[window]), self.config.embedding_scale)

    def run(self, layer: Layer, index: int, keep: bool) -> None:
        """All windows through the layer of this number. keep: its results become the hidden states."""
        caches = self.caches(index)
        for window, cache in enumerate(caches):
            if isinstance(cache, RecurrentCache):
                for state in (cache.conv, cache.matrix):
                    state.zero_()
            token_input = None
            if self.per_layer:
                token_input = self.per_layer(self.ids[window], self.embedded(window))[index]
            out = layer(self.hidden[window], self.batch, cache, token_input)
            if keep:
                self.hidden[window] = out
        if keep and index in self.read_by_others:
            self.shared[index] = caches

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` needs."""
        found = {"hidden": self.hidden}
        for layer, caches in self.shared.items():
            for window, cache in enumerate(caches):
                found |= {f"{layer}.{window}.{name}": part for name, part in parts_of(cache).items()}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As it was when `tensors` gave them."""
        self.hidden = tensors["hidden"].clone()
        for layer in sorted({int(name.split(".")[0]) for name in tensors if name != "hidden"}):
            self.shared[layer] = self.caches(layer)
            for window, cache in enumerate(self.shared[layer]):
                for name, part in parts_of(cache).items():
                    part.copy_(tensors[f"{layer}.{window}.{name}"])

    def caches(self, index: int) -> list[LayerCache]:
        """One for each window: its own where others will read it, or one for all, one after another."""
        mixer, windows = self.mixers[index], len(self.ids)
        if isinstance(mixer, AttentionConfig) and mixer.kv_source is not None:
            return self.shared[mixer.kv_source]
        count = windows if index in self.read_by_others else 1
        made = make_caches([mixer] * count, self.blocks, BLOCK_SIZE, 1, torch.float32, CPU)
        return made if count > 1 else made * windows


def parts_of(cache: LayerCache) -> dict[str, Tensor]:
    return {name: part for name, part in vars(cache).items() if isinstance(part, Tensor)}


def one_batch(config: ModelConfig, length: int, blocks: int) -> Batch:
    """Of one sequence of so many new tokens."""
    rows = 1 if state_bytes(config, 4) else 0
    state = SequenceState(BlockPool(blocks, BLOCK_SIZE, rows))
    state.extend(length)
    batch = Batch.of([state], [[0] * length], [], CPU)
    mixers = [layer.mixer for layer in config.layers]
    for mixer in mixers:
        if isinstance(mixer, AttentionConfig | LatentConfig) and mixer.rope:
            batch.angles[mixer.rope] = Rope(mixer.rope, length, CPU).angles(batch.positions)
    return batch
