"""AutoAWQ's `gemm` layout: `X.qweight` int32 [in, out / 8], `X.qzeros` int32 [groups, out / 8], `X.scales`
[groups, out]; the nibbles of a word, from the lowest, are rows 0, 2, 4, 6, 1, 3, 5, 7 of the eight it stands for.

Source: AutoAWQ, `awq/utils/packing_utils.py`.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import Quantization
from localllm.checkpoint.quantized.words import WORDS, assembled, check_whole, codes_of, take_scales
from localllm.checkpoint.safetensors import Weights
from localllm.quant.formats import int4
from localllm.quant.tensor import QuantizedTensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble in which each of eight rows lies
ROWS = len(PLACES)  # of a word


def take_awq(weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedTensor:
    [scheme] = quantization.schemes
    rows, columns = shape
    check_whole(weights, f"{name}.qweight", rows, ROWS, "rows")
    check_whole(weights, f"{name}.qweight", columns, scheme.group or columns, "columns")
    groups = scheme.groups(columns)
    qweight = weights.take(f"{name}.qweight", (columns, rows // ROWS), WORDS)
    scales = take_scales(weights, f"{name}.scales", (groups, rows))
    zero = None
    if weights.has(f"{name}.qzeros") or not scheme.symmetric:
        zero = in_order(weights.take(f"{name}.qzeros", (groups, rows // ROWS), WORDS)).T.contiguous()
    packed = int4.pack(in_order(qweight).T.contiguous())
    return assembled(weights, name, shape, scheme, packed, scales.T.contiguous(), zero)


def in_order(words: Tensor) -> Tensor:
    """int32 [n, out / 8] -> codes uint8 [n, out]"""
    codes = codes_of(words, 4, ROWS * words.shape[1]).unflatten(1, (-1, ROWS))
    return codes[..., torch.tensor(PLACES)].flatten(1)
