"""Converts packed weights of every format to the packed GPU layout, with the same codes and scales.

No value changes. Works on the weights' device, some rows at a time, in memory that does not grow with them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quant.formats import gguf, int4
from localllm.quant.formats.planes import TILE_ROWS, pack_codes, pack_float_codes
from localllm.quant.packing import (
    FP8,
    FP8_GPU_PACKED,
    GGUF_GPU_PACKED,
    INT4,
    INT8,
    MXFP4,
    MXFP4_GPU_PACKED,
    chunk_words,
)
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

CHUNK_ELEMENTS = 2**21  # unpacked at a time: formats of 2 to 6 bits take up to 30 bytes each


def no_op() -> None:
    pass


def repack(*weights: QuantizedTensor, on_read: Callable[[], None] = no_op) -> QuantizedTensor | None:
    """Return the weights stacked by rows in packed GPU layout; None if they cannot be packed so or stacked.

    on_read: called whenever a part of the weights has been read.
    """
    first = weights[0]
    if not can_repack(first) or not all(same_format(first, weight) for weight in weights[1:]):
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


def same_format(first: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return whether the weights can be stacked as one."""
    dtypes = ({name: part.dtype for name, part in weight.parts.items()} for weight in (first, other))
    same = (first.format, first.group, first.shape[1]) == (other.format, other.group, other.shape[1])
    return same and next(dtypes) == next(dtypes) and COLUMN_ORDER not in first.parts


def repack_rows(weight: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Return some rows in packed GPU layout."""
    parts = {name: part[rows] for name, part in weight.parts.items() if name != COLUMN_ORDER}
    columns = weight.shape[1]
    match weight.format:
        case "int4":
            return pack_codes(int4.unpack_int4(parts.pop("q"), columns), weight.group, 4, **parts)
        case "int8":
            return pack_codes(parts.pop("q"), weight.group, 8, **parts)
        case "fp8":
            return pack_float_codes(FP8_GPU_PACKED, parts["q"].view(torch.int8), weight.group, parts["scale"])
        case "mxfp4":
            codes = int4.unpack_int4(parts["q"].flatten(1), columns)
            return pack_float_codes(MXFP4_GPU_PACKED, codes, 32, parts["scale"])
        case form:
            return repack_gguf(parts[gguf.BLOCKS_PART], form, columns)


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
        codes = codes + int4.INT4_ZERO_POINT
    scales = {"scale": unpacked.scale, "minimum": unpacked.minimum}
    if unpacked.factor is not None:
        scales = {"scale": unpacked.factor, "minimum": unpacked.minimum_factor, "block_scale": unpacked.scale}
        scales["block_minimum"] = unpacked.minimum
    parts = {name: part.reshape(count, -1) for name, part in scales.items() if part is not None}
    return pack_codes(codes, columns // parts["scale"].shape[1], bits, **parts)
