"""Temporarily changes which kernels run, through the kernel registry."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localllm.runtime.kernels.registry import KERNELS, Kernel, always_supported


@contextmanager
def prefer_kernel(
    operation: str, run: Callable[..., Any], unsupported: Callable[..., str | None] = always_supported
) -> Iterator[None]:
    """Try `run` before all other kernels of the operation. unsupported: as of `Kernel`."""
    kernel = Kernel(operation, "bench", unsupported, run)
    KERNELS[operation].insert(0, kernel)
    try:
        yield
    finally:
        KERNELS[operation].remove(kernel)


@contextmanager
def prefer_reference(operation: str, unsupported: Callable[..., str | None] = always_supported) -> Iterator[None]:
    """Compute the operation with its reference: torch, one operation after another."""
    with prefer_kernel(operation, KERNELS[operation][-1].run, unsupported):
        yield


def select_kernel(operation: str, arguments: tuple[Any, ...], excluded: Callable[..., Any]) -> Kernel:
    """Return the kernel that runs if `excluded`, the function of another one, does not."""
    return next(k for k in KERNELS[operation] if k.run is not excluded and k.unsupported(*arguments) is None)
