"""AutoAWQ's `gemm` layout: `X.qweight` int32 [in, out / 8], `X.qzeros` int32 [groups, out / 8], `X.scales`
[groups, out]. The nibbles of a word, from the lowest, are rows 0, 2, 4, 6, 1, 3, 5, 7 of its eight rows.

Source: AutoAWQ, `awq/utils/packing_utils.py`.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import Quantization
from localllm.checkpoint.quantized.words import (
    WORD_DTYPES,
    as_bytes,
    assemble,
    check_multiple,
    take_scales,
    unpack_codes,
)
from localllm.checkpoint.tensors import Weights
from localllm.quant.tensor import QuantizedTensor

NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight rows
ROWS_PER_WORD = len(NIBBLE_OF_ROW)  # of a word


def take_awq(weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedTensor:
    [scheme] = quantization.schemes
    rows, columns = shape
    check_multiple(weights, f"{name}.qweight", rows, ROWS_PER_WORD, "rows")
    check_multiple(weights, f"{name}.qweight", columns, scheme.group_size or columns, "columns")
    groups = scheme.group_count(columns)
    qweight = weights.take(f"{name}.qweight", (columns, rows // ROWS_PER_WORD), WORD_DTYPES)
    scales = take_scales(weights, f"{name}.scales", (groups, rows))
    zero = None
    if weights.has(f"{name}.qzeros") or not scheme.symmetric:
        zero = unpack_rows(
            weights.take(f"{name}.qzeros", (groups, rows // ROWS_PER_WORD), WORD_DTYPES)
        ).T.contiguous()
    return assemble(weights, name, shape, scheme, repack_rows(qweight), scales.T.contiguous(), zero)


def repack_rows(words: Tensor) -> Tensor:
    """Convert int32 [in, out / 8] to the INT4 layout, uint8 [out, ceil(in / 2)].

    It works on bytes, because a checkpoint has billions of codes.
    """
    words = torch.nn.functional.pad(words, (0, 0, 0, len(words) % 2))
    first, second = (as_bytes(half.T).unflatten(1, (-1, 4)) for half in (words[::2], words[1::2]))
    nibbles = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)  # each [out / 8, ceil(in / 2), 4]
    packed = first.new_empty(len(first), ROWS_PER_WORD, first.shape[1])
    for row, nibble in enumerate(NIBBLE_OF_ROW):
        packed[:, row] = nibbles[nibble % 2][..., nibble // 2]
    return packed.flatten(0, 1)


def unpack_rows(words: Tensor) -> Tensor:
    """Convert int32 [n, out / 8] to codes, uint8 [n, out]."""
    codes = unpack_codes(words, 4, ROWS_PER_WORD * words.shape[1]).unflatten(1, (-1, ROWS_PER_WORD))
    return codes[..., torch.tensor(NIBBLE_OF_ROW)].flatten(1)
