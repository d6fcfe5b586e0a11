"""INT4 and INT8 as the GPU's kernels read them: neighbours in a plane of codes meet neighbours in x.

A row is cut into chunks, and a chunk into planes: 4 of INT4, 2 of INT8. Word c of a chunk is 16 bits and holds
column c of each plane, the first plane in the lowest bits: of a chunk of W words, column j * W + c lies in nibble
(byte) j of word c. So two words side by side, shifted and masked, are two neighbours of one plane, in the halves
of a register, where tensor cores want them. A plane lies in one group. Of 16 rows lie the words of a chunk one
row after the other, 512 to 2048 bytes, and then those of the next chunk: a program reads memory from its first
byte to its last.

Parts, K being the columns filled up to whole chunks, and rows to whole 16s:
- q: int16 [rows / 16, chunks, 16, W], codes of 0 to 15 in INT4, -128 to 127 in INT8; W is 16, 32 or 64;
- scale: [groups, rows] in float16, bfloat16 or float32, as the weight had it;
- zero: [groups, rows], uint8 or int8; or minimum, as scale: w = code * scale - minimum. Without either the zero
  point of INT4 is 8;
- of GGUF's K-quants scale and minimum are int8 factors of block_scale and block_minimum, float16 [blocks, rows];
- columns: as `groups.py` says.
What fills up has scale 0 where it fills whole groups; in others x must be zero there.
"""

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.formats import int4
from localllm.quant.formats.groups import expand_groups
from localllm.quant.packing import (
    INT4_GPU_PACKED,
    INT8_GPU_PACKED,
    PLANES_PER_WORD,
    chunk_words,
    gpu_packed_columns,
)
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

TILE_ROWS = 16  # of a tile of tensor cores
ZERO_POINT = {INT4_GPU_PACKED: int4.INT4_ZERO_POINT, INT8_GPU_PACKED: 0}


def pack_codes(
    codes: Tensor,
    group: int | None,
    bits: int,
    *,
    scale: Tensor,
    zero: Tensor | None = None,
    minimum: Tensor | None = None,
    block_scale: Tensor | None = None,
    block_minimum: Tensor | None = None,
) -> QuantizedTensor:
    """codes: [out, in] of 0 to 15 (bits 4) or -128 to 127 (8); others: [out, groups] or [out, blocks], as above.

    group: columns that share a scale, whole 16s; None: all.
    """
    rows, columns = codes.shape
    form = INT4_GPU_PACKED if bits == 4 else INT8_GPU_PACKED
    words = chunk_words(group, columns, bits)
    assert words, f"groups of {group} columns"
    stored = gpu_packed_columns(words, columns, bits)
    group = group if group and group < columns else None
    groups = -(-stored // group) if group else 1
    filled = F.pad(
        codes.to(torch.uint8) if bits == 4 else codes.to(torch.int8), (0, stored - columns, 0, -rows % TILE_ROWS)
    )
    numbers = {"scale": scale, "zero": zero, "minimum": minimum}
    parts = {name: transpose_scales(part, groups) for name, part in numbers.items() if part is not None}
    blocks = {"block_scale": block_scale, "block_minimum": block_minimum}
    if block_scale is not None:
        assert stored == columns, f"blocks of {columns} columns"
    parts |= {name: transpose_scales(part, part.shape[1]) for name, part in blocks.items() if part is not None}
    return QuantizedTensor(form, (rows, columns), {"q": pack_words(filled, words, bits), **parts}, group)


def pack_words(codes: Tensor, words: int, bits: int) -> Tensor:
    """uint8 or int8 [rows, K] -> q"""
    planes = codes.view(torch.uint8).unflatten(1, (-1, 16 // bits, words)).unbind(2)  # [rows, chunks, words] each
    low = planes[0] | (planes[1] << 4) if bits == 4 else planes[0]
    high = planes[2] | (planes[3] << 4) if bits == 4 else planes[1]
    q = torch.stack((low, high), -1).view(torch.int16).squeeze(-1)  # the low byte first
    return q.unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()


def transpose_scales(part: Tensor, groups: int) -> Tensor:
    """[out, n] -> [groups, rows]"""
    return F.pad(part, (0, groups - part.shape[1], 0, -len(part) % TILE_ROWS)).T.contiguous()


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, computed in float32."""
    parts, (rows, columns) = weight.parts, weight.shape
    q = parts["q"].transpose(1, 2).flatten(0, 1).unsqueeze(-1).view(torch.uint8)  # [rows, chunks, words, 2]
    halves = (
        torch.stack((q & 15, q >> 4), -1).flatten(-2) if weight.format == INT4_GPU_PACKED else q.view(torch.int8)
    )
    found = halves.transpose(2, 3).flatten(1).float()  # [rows, K]
    stored = found.shape[1]

    def of_columns(name: str, wide: int | None) -> Tensor:
        return expand_groups(parts[name].T.float(), wide or stored, stored)

    def number(name: str) -> Tensor:
        """`scale` or `minimum`, [rows, K]"""
        block = "block_" + name
        if block not in parts:
            return of_columns(name, weight.group)
        return of_columns(block, stored // len(parts[block])) * of_columns(name, weight.group)

    if "zero" in parts:
        found -= of_columns("zero", weight.group)
    elif "minimum" not in parts:
        found -= ZERO_POINT[weight.format]
    found *= number("scale")
    if "minimum" in parts:
        found -= number("minimum")
    found = found[:rows, :columns]
    if COLUMN_ORDER in parts:
        found = torch.empty_like(found).index_copy_(1, parts[COLUMN_ORDER], found)
    return found.to(dtype)


def planes_per_scale(weight: QuantizedTensor) -> int:
    """How many planes of a chunk share a scale; all where chunks do."""
    words, planes = weight.parts["q"].shape[3], PLANES_PER_WORD[weight.format]
    return gcd(weight.group // words, planes) if weight.group else planes
