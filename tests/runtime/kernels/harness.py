"""Every kernel against its reference: no further from the exact answer than twice plain torch in the same dtype.

The bound needs no tuning: it is measured on the reference itself (FlashAttention's own test rule).
"""

from collections.abc import Callable
from typing import Any

import torch

from localllm.runtime.kernels.registry import KERNELS


def check(operation: str, make: Callable[[torch.dtype], tuple[Any, ...]], dtype: torch.dtype) -> list[str]:
    """Runs all kernels of `operation` that accept `make(dtype)`; returns their names."""
    *kernels, reference = KERNELS[operation]
    exact = reference.run(*make(torch.float64))
    plain = reference.run(*make(dtype)).double()
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    ran = []
    for kernel in kernels:
        arguments = make(dtype)
        if kernel.when(*arguments) is None:
            error = (kernel.run(*arguments).double() - exact).abs().max()
            assert error <= allowed, f"{operation}/{kernel.name}: {error:.2e} > {allowed:.2e}"
            ran.append(kernel.name)
    return ran
