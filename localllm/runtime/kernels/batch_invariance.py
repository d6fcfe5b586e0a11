"""Whether the result of a token may depend on the number of other tokens in its step.

Torch's products of many rows are faster than products with the same bits for each row regardless of the others; a
model that was loaded as deterministic uses the latter. Its runner enables this around its steps, for its thread
only, so that other models in the process are not affected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from localllm.arch.config import LatentConfig, ModelConfig
from localllm.errors import UsageError
from localllm.quant.vectors import DTYPE_MAX, KVDtype
from localllm.runtime.kernels.cpu.compile import cpu_supported

BATCH_INVARIANT: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def batch_invariant() -> bool:
    """Return whether each row must have the same bits regardless of the number of rows."""
    return BATCH_INVARIANT.get()


@contextmanager
def batch_invariance(enabled: bool) -> Iterator[None]:
    """Set batch invariance for everything that this thread computes in the block."""
    token = BATCH_INVARIANT.set(enabled)
    try:
        yield
    finally:
        BATCH_INVARIANT.reset(token)


def check_deterministic(config: ModelConfig, device: torch.device, kv_dtype: KVDtype) -> None:
    """Raise UsageError if deterministic results are not guaranteed for this model and device.

    Deterministic: results of a token depend on the tokens before it alone, not on the other tokens of a step, how
    a prompt is divided into chunks or what the prefix cache contains (docs/determinism.md).
    """
    if reason := why_not_deterministic(config, device, kv_dtype):
        raise UsageError(*reason)


def why_not_deterministic(config: ModelConfig, device: torch.device, kv_dtype: KVDtype) -> tuple[str, str] | None:
    """Return the obstacle and its remedy, or None if there is none."""
    if device.type != "cpu":
        reason = "--deterministic holds on a CPU alone: on a GPU, sums depend on how a prompt is cut"
        return reason, "add --device cpu"
    if not cpu_supported():
        return (
            "this processor lacks the instructions that the kernels for --deterministic need",
            "leave out --deterministic",
        )
    if kv_dtype in DTYPE_MAX and any(isinstance(layer.mixer, LatentConfig) for layer in config.layers):
        return "--deterministic does not hold for latents (MLA) in 8 bits", "leave out --kv-dtype"
    return None
