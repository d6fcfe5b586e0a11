"""Runs one layer at a time over the calibration text: the runtime's layers, with a hook at every product.

A layer takes its weights from a source that records what it has read, so that it can be rebuilt from modified
tensors. All windows have the same length and begin at position 0, so that one batch serves them all. Computes in
float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, LatentConfig, ModelConfig
from localllm.arch.cost import state_bytes
from localllm.checkpoint.header import Header
from localllm.checkpoint.tensors import Weights
from localllm.plan.memory import BLOCK_SIZE
from localllm.quant.dequantize import dequantize
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import LayerCache, RecurrentCache, make_caches
from localllm.runtime.layers.linear import Embedding, Linear
from localllm.runtime.layers.per_layer import PerLayerInputs
from localllm.runtime.layers.rope import Rope
from localllm.runtime.model import Layer, scale_by
from localllm.runtime.weight_source import WeightSource

CPU = torch.device("cpu")
LAYERS_MODULE_PREFIX = "localllm.runtime.layers."
InputHook = Callable[[Tensor], Tensor]


@dataclass
class RecordedWeights:
    """tensors: by runtime name, dense, however the file stores them; stacked_names: the matrices that form one
    product, by the id of their stack."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stacked_names: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def matrix_groups(self) -> list[tuple[str, ...]]:
        """Return the names of matrices, without `.weight`, grouped by product."""
        return list(self.stacked_names.values())


class RecordingSource(WeightSource):
    """Records each weight that is read from it.

    stack: the layer is going to run; otherwise no matrices are stacked, and names are only recorded.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        recorded: RecordedWeights,
        stack: bool = True,
    ):
        super().__init__(weights, device, dtype)
        self.recorded = recorded
        self.stack = stack

    def under(self, name: str) -> "RecordingSource":
        return RecordingSource(self.weights.scoped(name), self.device, self.dtype, self.recorded, self.stack)

    def full_name(self, name: str) -> str:
        return self.weights.prefix + name

    def record(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        tensors, full = self.recorded.tensors, self.full_name(name)
        if full not in tensors:
            tensors[full] = read()
        return tensors[full]

    def float32_tensor(self, name: str, *shape: int) -> Tensor:
        return self.record(name, lambda: super(RecordingSource, self).float32_tensor(name, *shape)).float()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, at least in its stored precision: tensors that stay unquantized keep every bit."""

        def read() -> Tensor:
            stored = self.weights.take(name, shape)
            dtype = (
                torch.float32 if stored.dtype == torch.float64 else torch.promote_types(stored.dtype, self.dtype)
            )
            return self.checked_finite(name, stored.to(self.device, dtype))

        return self.record(name, read)

    def dense_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix as any other tensor: methods compute with it."""
        return self.tensor(name, rows, columns)

    def lookup_table(self, name: str, rows: int, columns: int) -> Tensor:
        def read() -> Tensor:
            table = super(RecordingSource, self).lookup_table(name, rows, columns)
            return table if isinstance(table, Tensor) else dequantize(table, self.dtype)

        return self.record(f"{name}.weight", read)

    def dequantized_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.record(
            f"{name}.weight", lambda: super(RecordingSource, self).dequantized_matrix(name, rows, columns)
        )

    def matrices(
        self,
        names: dict[str, int],
        columns: int,
        order: Callable[[], Tensor] | None = None,
        *,
        checked: bool = True,
    ) -> tuple[Tensor, ...]:
        matrices = [self.dequantized_matrix(name, rows, columns) for name, rows in names.items()]
        if not self.stack:
            stacked = torch.empty(0)
        else:
            stacked = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
            # Contiguous, as kernels need it: otherwise they would copy it, and the copy would have another id.
            stacked = (stacked if order is None else stacked[order()]).contiguous()
        self.recorded.stacked_names[id(stacked)] = tuple(map(self.full_name, names))
        return (stacked,)


class ObservedLinear:
    """A Linear with a hook that sees its inputs and may change them."""

    def __init__(self, linear: Linear, see: InputHook):
        self.linear = linear
        self.hook = see

    def __call__(self, x: Tensor, norm: Norm | None = None, **options: Any) -> Tensor:
        return self.linear(self.hook(norm(x) if norm else x), **options)


def build_layer(
    header: Header, config: ModelConfig, index: int, recorded: RecordedWeights, dtype: torch.dtype, stack: bool
) -> Layer:
    """Build a layer from recorded tensors, and the file for the rest. Raises like `WeightSource`."""
    recorded.stacked_names.clear()
    source = RecordingSource(Weights(header), CPU, dtype, recorded, stack)
    return Layer(config.layers[index], config, source.under(f"layers.{index}"))


def observe_linears(
    part: Any, stacked_names: dict[int, tuple[str, ...]], make_hook: Callable[[tuple[str, ...]], InputHook | None]
) -> None:
    """Install a hook at each Linear below `part` for which `make_hook` of its matrices' names returns one."""
    for owner, attribute, linear in find_linears(part):
        hook = make_hook(stacked_names[id(linear.weights[0])])
        if hook is not None:
            setattr(owner, attribute, ObservedLinear(linear, hook))


def find_linears(part: Any) -> Iterator[tuple[Any, str, Linear]]:
    """Yield each Linear with its owner and attribute."""
    for attribute, value in list(vars(part).items()):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Linear):
                yield part, attribute, item
            elif type(item).__module__.startswith(LAYERS_MODULE_PREFIX):
                yield from find_linears(item)


class HiddenStates:
    """The hidden states of all windows between two layers.

    ids: [windows, T] int64; hidden: [windows, T, hidden] float32; shared_caches: keys and values that later layers
    read, by layer and window.
    """

    def __init__(self, header: Header, config: ModelConfig, ids: Tensor):
        self.config = config
        self.ids = ids
        windows, length = ids.shape
        source = WeightSource(Weights(header), CPU, torch.float32)
        self.embedding = Embedding(source, "embed_tokens", config.vocab_size, config.hidden_size, as_stored=True)
        self.per_layer = PerLayerInputs(config.per_layer, config, source) if config.per_layer else None
        self.block_count = -(-length // BLOCK_SIZE)
        self.batch = single_sequence_batch(config, length, self.block_count)
        self.shared_kv_layers = {c.kv_source for c in self.mixers if isinstance(c, AttentionConfig)} - {None}
        self.shared_caches: dict[int, list[LayerCache]] = {}
        self.hidden = torch.empty(windows, length, config.hidden_size)
        for window in range(windows):
            self.hidden[window] = self.embed_window(window)

    @property
    def mixers(self) -> list[Any]:
        return [layer.mixer for layer in self.config.layers]

    def embed_window(self, window: int) -> Tensor:
        return scale_by(self.embedding(self.ids[window]), self.config.embedding_scale)

    def run_layer(self, layer: Layer, index: int, keep: bool) -> None:
        """Run all windows through a layer. keep: store its outputs as the new hidden states."""
        caches = self.layer_caches(index)
        for window, cache in enumerate(caches):
            if isinstance(cache, RecurrentCache):
                for state in (cache.conv, cache.matrix):
                    state.zero_()
            token_input = None
            if self.per_layer:
                token_input = self.per_layer(self.ids[window], self.embed_window(window))[index]
            out = layer(self.hidden[window], self.batch, cache, token_input)
            if keep:
                self.hidden[window] = out
        if keep and index in self.shared_kv_layers:
            self.shared_caches[index] = caches

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `restore` needs."""
        tensors = {"hidden": self.hidden}
        for layer, caches in self.shared_caches.items():
            for window, cache in enumerate(caches):
                tensors |= {f"{layer}.{window}.{name}": part for name, part in cache_tensors(cache).items()}
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        self.hidden = tensors["hidden"].clone()
        for layer in sorted({int(name.split(".")[0]) for name in tensors if name != "hidden"}):
            self.shared_caches[layer] = self.layer_caches(layer)
            for window, cache in enumerate(self.shared_caches[layer]):
                for name, part in cache_tensors(cache).items():
                    part.copy_(tensors[f"{layer}.{window}.{name}"])

    def layer_caches(self, index: int) -> list[LayerCache]:
        """Return a cache for each window: separate ones if other layers read them, otherwise the same for all."""
        mixer, windows = self.mixers[index], len(self.ids)
        if isinstance(mixer, AttentionConfig) and mixer.kv_source is not None:
            return self.shared_caches[mixer.kv_source]
        count = windows if index in self.shared_kv_layers else 1
        caches = make_caches([mixer] * count, self.block_count, BLOCK_SIZE, 1, torch.float32, CPU)
        return caches if count > 1 else caches * windows


def cache_tensors(cache: LayerCache) -> dict[str, Tensor]:
    return {name: part for name, part in vars(cache).items() if isinstance(part, Tensor)}


def single_sequence_batch(config: ModelConfig, length: int, blocks: int) -> Batch:
    """Return a batch of one sequence with `length` new tokens."""
    state_slots = 1 if state_bytes(config, 4) else 0
    state = SequenceState(BlockPool(blocks, BLOCK_SIZE, state_slots))
    state.extend(length)
    batch = Batch.from_states([state], [[0] * length], [], CPU)
    mixers = [layer.mixer for layer in config.layers]
    for mixer in mixers:
        if isinstance(mixer, AttentionConfig | LatentConfig) and mixer.rope:
            batch.rope_angles[mixer.rope] = Rope(mixer.rope, length, CPU).angles(batch.positions)
    return batch
