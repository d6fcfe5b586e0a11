"""The layout of weights on a GPU: packed weights in planes, dense weights of a GGUF file in the dtype of x.

Each is repacked on its device, some rows at a time; this also reserves the scratch buffer for products of many
rows.
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
    repacked = repack(*weights, on_read=between)
    if repacked and dtype:
        reserve_scratch(repacked, dtype)
    return repacked
