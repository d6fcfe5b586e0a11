"""Uploads host values to device tensors without waiting for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor on the device, copied from pinned memory; on a CPU without a copy."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, copied from pinned memory. tensor: on the CPU, not modified afterwards."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor on the device.

    values: on the CPU, of the target's shape, not modified afterwards.
    """
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
