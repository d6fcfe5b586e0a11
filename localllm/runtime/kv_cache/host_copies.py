"""Blocks and recurrent states as tensors on the host, by the names that they have in a snapshot.

LAYER.TENSOR is a tensor of a layer's cache, with the layer's index in the whole model, so that stages name them as
one process does. Ranks that divide a layer have a part of the tensor each, LAYER.TENSOR.RANK.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.checkpoint.tensors import TORCH_DTYPES
from localllm.runtime.kv_cache.snapshot import DamagedSnapshot, KVSnapshot, Part, SnapshotTokens
from localllm.runtime.kv_cache.tensors import LayerCache, RecurrentCache, TieredTensor

SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
TensorType = tuple[torch.dtype, tuple[int, ...]]


class CacheTypes(NamedTuple):
    """The data type and shape of what each tensor has per token, and of what it has per recurrent state."""

    rows: Mapping[str, TensorType]
    states: Mapping[str, TensorType]

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return sum(map(bytes_of, self.rows.values()))

    @property
    def state_bytes(self) -> int:
        return sum(map(bytes_of, self.states.values()))

    def joined(self, others: "Iterable[CacheTypes]") -> "CacheTypes":
        """Return the types of these caches and of those of other ranks."""
        rows, states = dict(self.rows), dict(self.states)
        for other in others:
            rows |= other.rows
            states |= other.states
        return CacheTypes(rows, states)

    def check(self, rows: Mapping[str, Tensor], states: Iterable[Mapping[str, Tensor]]) -> None:
        """Raise DamagedSnapshot unless these tensors can be copied into the caches. rows: [tokens, ...] each"""
        found = [(self.rows, {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.items()})]
        for state in states:
            found.append((self.states, {name: (each.dtype, tuple(each.shape)) for name, each in state.items()}))
        if any(expected != types for expected, types in found):
            raise DamagedSnapshot("its tensors are of another model")

    def to_json(self) -> dict[str, Any]:
        return {
            kind: {name: [SAFETENSORS_DTYPES[dtype], shape] for name, (dtype, shape) in types.items()}
            for kind, types in self._asdict().items()
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "CacheTypes":
        return cls(
            **{
                kind: {name: (TORCH_DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in types.items()}
                for kind, types in fields.items()
            }
        )


def bytes_of(tensor_type: TensorType) -> int:
    dtype, shape = tensor_type
    return dtype.itemsize * prod(shape)


class NamedCaches:
    """The tensors of a process's caches by name."""

    def __init__(self, caches: ListLike[LayerCache], first_layer: int = 0, rank: int | None = None):
        """caches: of consecutive layers, of which several may share one; first_layer: index of the first in the
        model; rank: of this process, if several divide each layer"""
        suffix = "" if rank is None else f".{rank}"
        self.paged: dict[str, TieredTensor] = {}  # blocks
        self.recurrent: dict[str, Tensor] = {}  # [state slots, ...]
        layers = dict[LayerCache, int]()
        for layer, cache in enumerate(caches, first_layer):
            layers.setdefault(cache, layer)
        for cache, layer in layers.items():
            if isinstance(cache, RecurrentCache):
                named = {f"{layer}.{i}{suffix}": tensor for i, tensor in enumerate(cache.tensors) if len(tensor)}
                self.recurrent |= named
            else:
                self.paged |= {f"{layer}.{i}{suffix}": tensor for i, tensor in enumerate(cache.tiered)}

    @cached_property
    def types(self) -> CacheTypes:
        return CacheTypes(
            {name: (t.on_device.dtype, tuple(t.on_device.shape[1:])) for name, t in self.paged.items()},
            {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in self.recurrent.items()},
        )

    def pack(self, blocks: ListLike[int], state_slots: Mapping[int, int]) -> dict[str, Tensor]:
        """Copy blocks to the host, and recurrent states by the length that each belongs to. Those of a device
        arrive when it has executed its work so far."""
        packed = {name: tensor.read(blocks) for name, tensor in self.paged.items()}
        for length, slot in state_slots.items():
            for name, states in self.recurrent.items():
                copy = torch.empty(states.shape[1:], dtype=states.dtype, pin_memory=states.is_cuda)
                packed[f"state.{length}.{name}"] = copy.copy_(states[slot], non_blocking=True)
        return packed

    def unpack(
        self, blocks: ListLike[int], rows: Mapping[str, Tensor], states: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        """Fill blocks and state slots with tensors of the host, as `CacheTypes.check` has checked them; those of
        other ranks may be among them. states: by state slot"""
        for name, tensor in self.paged.items():
            tensor.write(blocks, rows[name])
        for slot, state in states.items():
            for name, tensor in self.recurrent.items():
                tensor[slot].copy_(state[name])


class HostCopy(NamedTuple):
    """Blocks and recurrent states on their way to the host."""

    nbytes: int
    wait: Callable[[], dict[str, Tensor]]  # returns them once they have arrived

    def snapshot(self, tokens: SnapshotTokens) -> KVSnapshot:
        """Return the snapshot of these tokens, which shares the memory of the tensors."""
        return KVSnapshot(tokens, {name: to_part(tensor) for name, tensor in self.wait().items()})

    def joined(self, other: "HostCopy") -> "HostCopy":
        """Return these tensors with others."""
        return HostCopy(self.nbytes + other.nbytes, lambda: self.wait() | other.wait())


def to_part(tensor: Tensor) -> Part:
    """Return a contiguous tensor on the host as bytes."""
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return Part(SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape), data.data)


def to_tensors(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Return tensors on the host that share the parts' memory."""
    return {
        name: torch.frombuffer(part.data, dtype=TORCH_DTYPES[part.dtype]).view(part.shape)
        for name, part in parts.items()
    }
