"""Kernels of a lagging device: each is one task, like a launch, that computes the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.runtime.kernels.experts import StackedExperts, experts_reference
from localllm.runtime.kernels.registry import KERNELS, Kernel
from localllm.runtime.kv_cache.tensors import KVCache, LatentCache
from tests.lagging.device import LaggingDevice, LagTensor, on_cpu, tensors_in
from tests.lagging.streams import active

GPU_KERNELS = "localllm.runtime.kernels.gpu"


def use_references(patch: pytest.MonkeyPatch) -> None:
    """Let the lagging device compute with torch. Attention and experts are single tasks, so that steps can be captured;
    other operations are torch's own, one by one. Only the kernels around a step and of sampling are Triton's."""
    for operation, kernels in list(KERNELS.items()):
        own = [kernel for kernel in kernels if not kernel.run.__module__.startswith(GPU_KERNELS)]
        if operation in REFERENCES:
            own.insert(0, Kernel(operation, "lagging", only_on_device(operation), REFERENCES[operation](own[-1])))
        patch.setitem(KERNELS, operation, own)


def only_on_device(operation: str) -> Callable[..., str | None]:
    def unsupported(x: Tensor, *others: Any) -> str | None:
        if not isinstance(x, LagTensor):
            return "not on a lagging device"
        stacked = operation != "experts" or isinstance(others[2], StackedExperts)
        return None if stacked else "the experts are not stacked"

    return unsupported


def as_task(result: Callable[..., Tensor]) -> Callable[[Kernel], Callable[..., Tensor]]:
    """Queue a reference. result: makes the empty result of a call."""

    def of(reference: Kernel) -> Callable[..., Tensor]:
        def run(*arguments: Any) -> Tensor:
            device, out = active(), result(*arguments)
            assert isinstance(device, LaggingDevice) and isinstance(out, LagTensor)
            given, target = on_cpu(arguments), out.on_cpu()
            with device.lock:
                device.launch(
                    reference.operation,
                    lambda: target.copy_(reference.run(*given)),
                    list(tensors_in(arguments)),
                    [out],
                )
            return out

        return run

    return of


def latent_result(q: Tensor, cache: LatentCache, batch: Any, config: Any, k_b: Tensor, v_b: Tensor) -> Tensor:
    return q.new_empty(len(q), q.shape[1], v_b.shape[1])


REFERENCES: dict[str, Callable[[Kernel], Callable[..., Tensor]]] = {
    "attention": as_task(lambda q, *_: torch.empty_like(q)),
    "latent_attention": as_task(latent_result),
    "experts": as_task(lambda x, *_: torch.empty_like(x)),
}
assert experts_reference and KVCache  # the references and caches that `on_cpu` copies
