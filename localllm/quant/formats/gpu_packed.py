"""The packed layout of GPU kernels, in planes: adjacent codes of a plane meet adjacent elements of x.

`repack` converts INT4, INT8, FP8, MXFP4 and GGUF weights to it on their device, some rows at a time, with the same
codes and scales.

A row is divided into chunks, and a chunk into planes: 4 for INT4, 2 for INT8. Word c of a chunk is 16 bits and
holds column c of each plane, the first plane in the lowest bits: of a chunk of W words, column j * W + c is in
nibble (byte) j of word c. So two adjacent words, shifted and masked, are two adjacent elements of one plane, in
the halves of a register, as tensor cores need them. A plane is within one group. The words of a chunk of 16 rows
are stored row by row, 512 to 2048 bytes, followed by those of the next chunk: a program reads memory sequentially.

Parts, with K the columns padded to whole chunks, and rows padded to multiples of 16:
- q: int16 [rows / 16, chunks, 16, W], codes of 0 to 15 in INT4, -128 to 127 in INT8; W is 16, 32 or 64;
- scale: [groups, rows] in float16, bfloat16 or float32, as in the weight;
- zero: [groups, rows], uint8 or int8; or minimum, like scale: w = code * scale - minimum. Without either, the zero
  point of INT4 is 8;
- for GGUF's K-quants, scale and minimum are int8 factors of block_scale and block_minimum, float16 [blocks, rows];
- columns: see `groups.py`.
Padding groups have scale 0; in other padding, x must be zero.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.formats import gguf
from localllm.quant.formats.groups import (
    INT4_ZERO_POINT,
    MXFP4_GROUP,
    SIGNED_E2M1_VALUES,
    expand_groups,
    unpack_int4,
)
from localllm.quant.packing import (
    FP8,
    FP8_GPU_PACKED,
    GGUF_GPU_PACKED,
    INT4,
    INT4_GPU_PACKED,
    INT8,
    INT8_GPU_PACKED,
    MXFP4,
    MXFP4_GPU_PACKED,
    PLANES_PER_WORD,
    chunk_words,
    gpu_packed_columns,
)
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor, can_stack, device_table, no_op

TILE_ROWS = 16  # of a tensor core's tile
ZERO_POINT = {INT4_GPU_PACKED: INT4_ZERO_POINT, INT8_GPU_PACKED: 0}
# The integer format whose layout a float format shares.
INTEGER_LAYOUT = {MXFP4_GPU_PACKED: INT4_GPU_PACKED, FP8_GPU_PACKED: INT8_GPU_PACKED}
CHUNK_ELEMENTS = 2**21  # unpacked at a time: formats of 2 to 6 bits take up to 30 bytes each


def repack(*weights: QuantizedTensor, on_read: Callable[[], None] = no_op) -> QuantizedTensor | None:
    """Return the weights stacked by rows in packed GPU layout; None if they cannot be packed so or stacked.

    on_read: called whenever a part of the weights has been read.
    """
    first = weights[0]
    if not can_repack(first) or not all(can_stack(first, weight) for weight in weights[1:]):
        return None
    if any(weight.shape[0] % TILE_ROWS for weight in weights[:-1]):
        return None
    rows = sum(weight.shape[0] for weight in weights)
    max_rows = max(1, CHUNK_ELEMENTS // first.shape[1] // TILE_ROWS) * TILE_ROWS
    packed: dict[str, Tensor] = {}
    packed_format, group, begin = "", None, 0
    for weight in weights:
        for first_row in range(0, weight.shape[0], max_rows):
            rows_packed = repack_rows(weight, slice(first_row, first_row + max_rows))
            packed_format, group = rows_packed.format, rows_packed.group
            write_rows(rows_packed.parts, packed, begin, -(-rows // TILE_ROWS) * TILE_ROWS)
            begin += rows_packed.shape[0]
        on_read()
    if COLUMN_ORDER in first.parts:
        packed[COLUMN_ORDER] = first.parts[COLUMN_ORDER]
    return QuantizedTensor(packed_format, (rows, first.shape[1]), packed, group)


def write_rows(parts: dict[str, Tensor], packed: dict[str, Tensor], begin: int, rows: int) -> None:
    """Write some rows to the stacked parts, from row `begin` on."""
    for name, part in parts.items():
        if name == "q":
            target = packed.setdefault(name, part.new_empty(rows // TILE_ROWS, *part.shape[1:]))
            target[begin // TILE_ROWS : begin // TILE_ROWS + len(part)] = part
        else:
            target = packed.setdefault(name, part.new_empty(len(part), rows))
            target[:, begin : begin + part.shape[1]] = part


def can_repack(weight: QuantizedTensor) -> bool:
    bits = {INT4: 4, INT8: 8, FP8: 8, MXFP4: 4}.get(weight.format)
    if bits is None:
        return weight.format in GGUF_GPU_PACKED
    return chunk_words(weight.group, weight.shape[1], bits) is not None


def repack_rows(weight: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Return some rows in packed GPU layout."""
    parts = {name: part[rows] for name, part in weight.parts.items() if name != COLUMN_ORDER}
    columns = weight.shape[1]
    match weight.format:
        case "int4":
            return pack_codes(unpack_int4(parts.pop("q"), columns), weight.group, 4, **parts)
        case "int8":
            return pack_codes(parts.pop("q"), weight.group, 8, **parts)
        case "fp8":
            return pack_float_codes(FP8_GPU_PACKED, parts["q"].view(torch.int8), weight.group, parts["scale"])
        case "mxfp4":
            codes = unpack_int4(parts["q"].flatten(1), columns)
            return pack_float_codes(MXFP4_GPU_PACKED, codes, 32, parts["scale"])
        case block_format:
            return repack_gguf(parts[gguf.BLOCKS_PART], block_format, columns)


def repack_gguf(rows: Tensor, block_format: str, columns: int) -> QuantizedTensor:
    """Repack rows of GGUF blocks, uint8 [n, bytes of a row]."""
    blocks = rows.unflatten(1, (-1, gguf.BLOCK_TYPE_BY_NAME[block_format].block_bytes)).flatten(0, 1)
    count = len(rows)
    if block_format == "mxfp4_gguf":
        codes, exponents = gguf.nibbles(blocks[:, 1:]).flatten(1), blocks[:, 0]
        return pack_float_codes(MXFP4_GPU_PACKED, codes.reshape(count, columns), 32, exponents.reshape(count, -1))
    unpacked = gguf.UNPACKERS[block_format](blocks)
    bits, codes = GGUF_GPU_PACKED[block_format][0], unpacked.codes.reshape(count, columns)
    if bits == 4 and unpacked.minimum is None:
        codes = codes + INT4_ZERO_POINT
    scales = {"scale": unpacked.scale, "minimum": unpacked.minimum}
    if unpacked.factor is not None:
        scales = {"scale": unpacked.factor, "minimum": unpacked.minimum_factor, "block_scale": unpacked.scale}
        scales["block_minimum"] = unpacked.minimum
    parts = {name: part.reshape(count, -1) for name, part in scales.items() if part is not None}
    return pack_codes(codes, columns // parts["scale"].shape[1], bits, **parts)


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
    """Pack codes [out, in] of 0 to 15 (bits 4) or -128 to 127 (8); others: [out, groups] or [out, blocks].

    group: columns that share a scale, a multiple of 16; None: all.
    """
    rows, columns = codes.shape
    packed_format = INT4_GPU_PACKED if bits == 4 else INT8_GPU_PACKED
    words = chunk_words(group, columns, bits)
    assert words, f"groups of {group} columns"
    padded_columns = gpu_packed_columns(words, columns, bits)
    group = group if group and group < columns else None
    groups = -(-padded_columns // group) if group else 1
    padded = F.pad(
        codes.to(torch.uint8) if bits == 4 else codes.to(torch.int8),
        (0, padded_columns - columns, 0, -rows % TILE_ROWS),
    )
    scales = {"scale": scale, "zero": zero, "minimum": minimum}
    parts = {name: transpose_scales(part, groups) for name, part in scales.items() if part is not None}
    blocks = {"block_scale": block_scale, "block_minimum": block_minimum}
    if block_scale is not None:
        assert padded_columns == columns, f"blocks of {columns} columns"
    parts |= {name: transpose_scales(part, part.shape[1]) for name, part in blocks.items() if part is not None}
    return QuantizedTensor(packed_format, (rows, columns), {"q": pack_words(padded, words, bits), **parts}, group)


def pack_words(codes: Tensor, words: int, bits: int) -> Tensor:
    """Pack codes, uint8 or int8 [rows, K], to q."""
    planes = codes.view(torch.uint8).unflatten(1, (-1, 16 // bits, words)).unbind(2)  # [rows, chunks, words] each
    low = planes[0] | (planes[1] << 4) if bits == 4 else planes[0]
    high = planes[2] | (planes[3] << 4) if bits == 4 else planes[1]
    q = torch.stack((low, high), -1).view(torch.int16).squeeze(-1)  # low byte first
    return q.unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()


def transpose_scales(part: Tensor, groups: int) -> Tensor:
    """Pad and transpose [out, n] -> [groups, rows]."""
    return F.pad(part, (0, groups - part.shape[1], 0, -len(part) % TILE_ROWS)).T.contiguous()


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, computed in float32."""
    parts, (rows, columns) = weight.parts, weight.shape
    q = parts["q"].transpose(1, 2).flatten(0, 1).unsqueeze(-1).view(torch.uint8)  # [rows, chunks, words, 2]
    halves = (
        torch.stack((q & 15, q >> 4), -1).flatten(-2) if weight.format == INT4_GPU_PACKED else q.view(torch.int8)
    )
    values = halves.transpose(2, 3).flatten(1).float()  # [rows, K]
    padded_columns = values.shape[1]

    def expand(name: str, wide: int | None) -> Tensor:
        return expand_groups(parts[name].T.float(), wide or padded_columns, padded_columns)

    def combined_scale(name: str) -> Tensor:
        """Return `scale` or `minimum`, [rows, K]."""
        block = "block_" + name
        if block not in parts:
            return expand(name, weight.group)
        return expand(block, padded_columns // len(parts[block])) * expand(name, weight.group)

    if "zero" in parts:
        values -= expand("zero", weight.group)
    elif "minimum" not in parts:
        values -= ZERO_POINT[weight.format]
    values *= combined_scale("scale")
    if "minimum" in parts:
        values -= combined_scale("minimum")
    values = values[:rows, :columns]
    if COLUMN_ORDER in parts:
        values = torch.empty_like(values).index_copy_(1, parts[COLUMN_ORDER], values)
    return values.to(dtype)


def planes_per_scale(weight: QuantizedTensor) -> int:
    """Return how many planes of a chunk share a scale; all of them if chunks do."""
    words, planes = weight.parts["q"].shape[3], PLANES_PER_WORD[weight.format]
    return gcd(weight.group // words, planes) if weight.group else planes


def pack_float_codes(float_format: str, codes: Tensor, group: int | None, scale: Tensor) -> QuantizedTensor:
    """Pack codes [out, in] of E2M1, 0 to 15, or the bytes of E4M3 as int8. scale: [out, groups]

    Parts: q as for INT4 and INT8; scale [groups, rows]: for MXFP4 uint8, the exponent plus 127 of each 32 columns,
    for FP8 float16, bfloat16 or float32. Padding is zero.
    """
    packed = pack_codes(codes, group, 4 if float_format == MXFP4_GPU_PACKED else 8, scale=scale)
    return replace(packed, format=float_format)


def unpack_codes(weight: QuantizedTensor) -> Tensor:
    """Return the codes, float32 [out, in]: 0 to 15, or -128 to 127."""
    q, scale = weight.parts["q"], weight.parts["scale"]
    one = torch.ones(1, scale.shape[1], device=q.device)
    parts = {"q": q, "scale": one, "zero": torch.zeros_like(one)}
    integers = QuantizedTensor(INTEGER_LAYOUT[weight.format], weight.shape, parts)
    return dequantize(integers, torch.float32)


def dequantize_float(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, computed in float32."""
    columns, codes, scale = weight.shape[1], unpack_codes(weight), weight.parts["scale"].T[: weight.shape[0]]
    if weight.format == MXFP4_GPU_PACKED:
        table = device_table(SIGNED_E2M1_VALUES, torch.float32, codes.device)
        values = torch.ldexp(table[codes.long()], expand_groups(scale, MXFP4_GROUP, columns).int() - 127)
    else:
        values = codes.to(torch.int8).view(torch.float8_e4m3fn).float()
        values *= expand_groups(scale.float(), weight.group or columns, columns)
    return values.to(dtype)
