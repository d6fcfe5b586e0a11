"""A torch function mode that moves the tensors of kernel tests to the GPU if there is one. They are made on the
CPU, so that their values are the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MAKERS = (
    *(torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace),
    *(torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros),
)


class OnDevice(TorchFunctionMode):
    """Redirects CPU tensors and tensors without a device to `device`, except `Tensor.cpu`."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in MAKERS:
            asked = named.pop("device", None)
            made = func(*args, **named)  # on the CPU, whose generators tests seed
            return made.to(self.device if self.stands_for(asked) else asked)
        if func is torch.Tensor.to:
            args = tuple(self.device if is_cpu(argument) else argument for argument in args)
            named = {name: self.device if is_cpu(value) else value for name, value in named.items()}
        if func is torch.Tensor.pin_memory:
            args = (args[0].cpu(), *args[1:])  # what is copied from the host was moved when it was made
        return func(*args, **named)

    def stands_for(self, asked: Any) -> bool:
        return asked is None or is_cpu(asked)


def is_cpu(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value) == "cpu"
