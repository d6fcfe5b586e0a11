"""From the host's lists to a device's tensors, without waiting for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy from pinned memory; on a CPU the tensor itself."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """tensor: on the CPU, and not changed after this."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: Tensor) -> None:
    """values: on the CPU, of the target's shape, and not changed after this."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
