"""Matrices of a generated model in the layout of torch's INT4 product, with the same codes and scales."""

import torch
from torch import Tensor

from localllm.benchmark.gpu.generated import RandomSource
from localllm.quant.dequantize import dequantize
from localllm.quant.formats.groups import unpack_int4
from localllm.quant.packing import INT4
from localllm.quant.tensor import QuantizedTensor

FORMAT = "int4pack"
INNER_TILES = 8  # along K, as in torchao
TOLERANCE = 0.02  # relative error of products in bfloat16


class TorchInt4Source(RandomSource):
    def under(self, name: str) -> "TorchInt4Source":
        return TorchInt4Source(self.form, self.device, self.dtype, self.tied, f"{self.prefix}{name}.", self.made)

    def packed_or_dequantized(self, weight: QuantizedTensor, name: str) -> Tensor | QuantizedTensor:
        if weight.format == INT4:
            return repack(weight, self.dtype)
        return super().packed_or_dequantized(weight, name)


def repack(weight: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """Repack the weight for torch. Raises RuntimeError if the product then differs."""
    assert weight.group, "torch's product requires groups"
    q, scale = weight.parts["q"], weight.parts["scale"].to(dtype)
    if q.device.type == "cpu":
        codes = unpack_int4(q, weight.shape[1]).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    else:  # the first of two columns is in the high bits
        packed = torch.ops.aten._convert_weight_to_int4pack((q << 4) | (q >> 4), INNER_TILES)
    scale_and_zero = torch.stack((scale.T, torch.zeros_like(scale.T)), -1).contiguous()  # [groups, out, 2]
    repacked = QuantizedTensor(FORMAT, weight.shape, {"q": packed, "scale": scale_and_zero}, weight.group)
    x = torch.randn(1, weight.shape[1], device=q.device, dtype=dtype)
    exact = x.float() @ dequantize(weight, torch.float32).T
    if not (linear_int4pack(x, repacked, None).float() - exact).norm() < TOLERANCE * exact.norm():
        raise RuntimeError("torch's INT4 product differs from that of the dequantized weight")
    return repacked


def linear_int4pack(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """x: [T, in] -> [T, out]"""
    product = (
        torch.ops.aten._weight_int4pack_mm_for_cpu
        if x.device.type == "cpu"
        else torch.ops.aten._weight_int4pack_mm
    )
    y = product(x.contiguous(), weight.parts["q"], weight.group, weight.parts["scale"])
    return y if bias is None else y + bias
