"""AutoAWQ's `gemm` layout: `X.qweight` int32 [in, out / 8], `X.qzeros` int32 [groups, out / 8], `X.scales`
[groups, out]; the nibbles of a word, from the lowest, are rows 0, 2, 4, 6, 1, 3, 5, 7 of the eight it stands for.

Source: AutoAWQ, `awq/utils/packing_utils.py`.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import Quantization
from localllm.checkpoint.quantized.words import WORDS, assembled, bytes_of, check_whole, codes_of, take_scales
from localllm.checkpoint.safetensors import Weights
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
    return assembled(weights, name, shape, scheme, packed_rows(qweight), scales.T.contiguous(), zero)


def packed_rows(words: Tensor) -> Tensor:
    """int32 [in, out / 8] -> INT4's own layout, uint8 [out, ceil(in / 2)]. In whole bytes, as a checkpoint has
    billions of codes."""
    words = torch.nn.functional.pad(words, (0, 0, 0, len(words) % 2))
    first, second = (bytes_of(half.T).unflatten(1, (-1, 4)) for half in (words[::2], words[1::2]))
    nibbles = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)  # each [out / 8, ceil(in / 2), 4]
    packed = first.new_empty(len(first), ROWS, first.shape[1])
    for row, place in enumerate(PLACES):
        packed[:, row] = nibbles[place % 2][..., place // 2]
    return packed.flatten(0, 1)


def in_order(words: Tensor) -> Tensor:
    """int32 [n, out / 8] -> codes uint8 [n, out]"""
    codes = codes_of(words, 4, ROWS * words.shape[1]).unflatten(1, (-1, ROWS))
    return codes[..., torch.tensor(PLACES)].flatten(1)
