"""How weights lie on a GPU: packed ones in planes, plain ones of a GGUF file in the dtype that they meet.

Each is laid out where it lies, some rows at a time; with it the scratch grows that many rows of x need.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf
from localllm.quant.formats.repack import repack
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.gpu.dequantize import reserve_scratch
from localllm.runtime.kernels.gpu.launch import gpu_unsupported
from localllm.runtime.kernels.registry import kernel


def gpu_packed_layout_unsupported(weight: QuantizedTensor) -> str | None:
    part = next(iter(weight.parts.values()))
    return None if part.device.type == "cuda" else gpu_unsupported(part)


@kernel("layout", "gpu-planes", gpu_packed_layout_unsupported, first=True)
def gpu_packed_layout(
    weights: list[QuantizedTensor], dtype: torch.dtype | None, between: Callable[[], None]
) -> Tensor | QuantizedTensor | None:
    if dtype and all(weight.format in gguf.PLAIN_DTYPES for weight in weights):
        return torch.cat([dequantize(weight, dtype) for weight in weights])
    found = repack(*weights, on_read=between)
    if found and dtype:
        reserve_scratch(found, dtype)
    return found
