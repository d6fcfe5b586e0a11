"""What torch really holds: the tensors that came to life, and the most that lived at once."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def alive() -> list[Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of memory that any of them covers; what several are views of counts once."""
    spans = sorted((t.data_ptr(), t.data_ptr() + extent(t)) for t in tensors if t.numel())
    total = end = 0
    for begin, until in spans:
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total


def extent(t: Tensor) -> int:
    """Bytes from the first to the last of its numbers."""
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that operations made inside it, while they live."""

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
