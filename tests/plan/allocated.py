"""Live torch tensors, and the peak of their bytes."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def alive() -> list[Tensor]:
    """Return the live tensors on the CPU, except those without memory that a test of another device left."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return [t for t in tensors if t.device.type == "cpu" and not isinstance(t, FakeTensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that the tensors cover; shared memory counts once."""
    spans = sorted((t.data_ptr(), t.data_ptr() + extent(t)) for t in tensors if t.numel())
    total = end = 0
    for begin, until in spans:
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total


def extent(t: Tensor) -> int:
    """Bytes from the first to the last element."""
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize


class Peak(TorchDispatchMode):
    """Records the peak bytes of live storages that operations inside the mode create."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf.untyped_storage(), before)
        return result

    def note(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in before or key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class Reads(TorchDispatchMode):
    """Records what operations read of older tensors, except table lookups and writes."""

    LOOKS_UP = ("aten.index.Tensor", "aten.embedding.default")
    WRITES = ("aten.index_copy_.default", "aten.copy_.default", "aten.index_put_.default")

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.read: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = given[1:] if name in self.LOOKS_UP + self.WRITES else given
        if not func.is_view:
            self.read += [t for t in given if t.untyped_storage().data_ptr() in self.storages]
        return func(*args, **(kwargs or {}))
