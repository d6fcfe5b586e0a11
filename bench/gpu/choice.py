"""Which kernels run, changed for a while: through the registry that the model asks, so that nothing of it is
patched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localllm.runtime.kernels.registry import KERNELS, Kernel, always_supported


@contextmanager
def first(
    operation: str, run: Callable[..., Any], when: Callable[..., str | None] = always_supported
) -> Iterator[None]:
    """`run` goes before all kernels of the operation where `when` accepts the call."""
    added = Kernel(operation, "bench", when, run)
    KERNELS[operation].insert(0, added)
    try:
        yield
    finally:
        KERNELS[operation].remove(added)


@contextmanager
def reference_of(operation: str, when: Callable[..., str | None] = always_supported) -> Iterator[None]:
    """Calls that `when` accepts are computed by the reference, plain torch one operation after another."""
    with first(operation, KERNELS[operation][-1].run, when):
        yield


def chosen(operation: str, arguments: tuple[Any, ...], after: Callable[..., Any]) -> Kernel:
    """The kernel that would run without `after`, which is one of them."""
    return next(k for k in KERNELS[operation] if k.run is not after and k.unsupported(*arguments) is None)
