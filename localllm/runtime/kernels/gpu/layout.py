"""How weights lie on a GPU: packed ones in planes, plain ones of a GGUF file in the dtype that they meet.

Each is laid out where it lies, some rows at a time; with it the scratch grows that many rows of x need.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf
from localllm.quant.formats.repack import repacked
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.gpu.dequantize import reserve
from localllm.runtime.kernels.gpu.launch import needs_gpu
from localllm.runtime.kernels.registry import kernel


def on_gpu(weight: QuantizedTensor) -> str | None:
    part = next(iter(weight.parts.values()))
    return None if part.device.type == "cuda" else needs_gpu(part)


@kernel("layout", "gpu-planes", on_gpu, first=True)
def lay_in_planes(
    weights: list[QuantizedTensor], dtype: torch.dtype | None, between: Callable[[], None]
) -> Tensor | QuantizedTensor | None:
    if dtype and all(weight.format in gguf.PLAIN for weight in weights):
        return torch.cat([dequantize(weight, dtype) for weight in weights])
    found = repacked(*weights, between=between)
    if found and dtype:
        reserve(found, dtype)
    return found
