"""Every kernel against its reference: no further from the exact answer than twice plain torch in the same dtype.

The bound needs no tuning: it is measured on the reference itself (FlashAttention's own test rule).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from localllm.runtime.kernels.cpu.compile import cpu_supported
from localllm.runtime.kernels.registry import KERNELS

COMPILED = cpu_supported()  # else torch computes alone
measured: list[tuple[str, float]] = []  # operation and error, as a part of what is allowed, of the test that runs
APPROXIMATED = 16  # `terms` of exp2 and division, in which a GPU may be wrong by 2 ulp each
needs_compiled = pytest.mark.skipif(not COMPILED, reason="no kernel is compiled for this processor")


def check(
    operation: str, make: Callable[[torch.dtype], tuple[Any, ...]], dtype: torch.dtype, terms: int = 1
) -> list[str]:
    """Run all kernels of `operation` that accept `make(dtype)`; return their names.

    terms: products that a number of the result sums in float32, where it is a few numbers, which the reference may
    meet exactly by chance: another order of them ends some sqrt(terms) roundings elsewhere.
    """
    *kernels, reference = KERNELS[operation]
    exact = reference.run(*make(torch.float64))
    plain = reference.run(*make(dtype)).double()
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * terms**0.5)
    allowed = 2 * (plain - exact).abs().max() + rounding * exact.abs().max()
    ran = []
    for kernel in kernels:
        arguments = make(dtype)
        if kernel.unsupported(*arguments) is None:
            error = (kernel.run(*arguments).double() - exact).abs().max()
            if not kernel.name.startswith("cpu"):
                measured.append((operation, float(error / allowed)))
            assert error <= allowed, f"{operation}/{kernel.name}: {error:.2e} > {allowed:.2e}"
            ran.append(kernel.name)
    return ran


def check_on_gpu(
    operation: str, make: Callable[[torch.dtype], tuple[Any, ...]], dtype: torch.dtype, terms: int = 1
) -> list[str]:
    """`check`, with the names of the kernels that run on a GPU, too."""
    return [name for name in check(operation, make, dtype, terms) if not name.startswith("cpu-")]
