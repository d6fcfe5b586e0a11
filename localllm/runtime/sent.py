"""From the host's lists to a device's tensors, without waiting for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy from pinned memory; on a CPU the tensor itself."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """tensor: on the CPU, and not changed after this."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
