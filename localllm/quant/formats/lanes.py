"""INT4 and INT8 as the CPU's kernels read them: 16 rows side by side, one in each lane of a vector.

A tile is 16 rows. Of a tile lie one after another the vectors of all its columns: in INT8 a vector holds columns
4c .. 4c + 3 of each row; in INT4 the low halves hold columns 32u + 4c .. 32u + 4c + 3 and the high halves those 16
further on, as they lie in GGUF's Q4_0. What is no whole tile or group is filled up with zeros.

Parts, K being the columns filled up to whole groups:
- q: int8 [tiles, K / 4, 16, 4], or uint8 [tiles, K / 8, 16, 4] with codes of 0 to 15;
- scale: [tiles, groups, 16] in float16, bfloat16 or float32;
- zero: [tiles, groups, 16], int8 or uint8 as q; or minimum, as scale: w = code * scale - minimum. Without either
  the zero point of INT4 is 8;
- of GGUF's K-quants scale and minimum are int8 factors of block_scale and block_minimum, float16 [tiles, blocks,
  16];
- columns: as `groups.py` says.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.formats import gguf, int4
from localllm.quant.formats.groups import expand_groups
from localllm.quant.memory import empty_huge_pages
from localllm.quant.packing import (
    GGUF_INTERLEAVED_BYTES,
    INT4,
    INT4_INTERLEAVED,
    INT8,
    INT8_INTERLEAVED,
    TILE_ROWS,
    interleaved_columns,
    interleaved_group,
)
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

HALF_COLUMNS = 16  # columns between the low and the high half of a byte
FOUR_BIT_GGUF = ("q4_0", "q4_1", "q2_k", "q3_k", "q4_k")
CHUNK_ELEMENTS = 2**21  # what is unpacked on the way stays in the cache


def no_op() -> None:
    pass


def interleave(*weights: QuantizedTensor, on_read: Callable[[], None] = no_op) -> QuantizedTensor | None:
    """The same numbers, one weight below the other; None where their formats do not go into lanes, or not
    together.

    on_read: called each time that some of what the weights hold has been read.
    """
    first = weights[0]
    piece = interleave_gguf if first.format in GGUF_INTERLEAVED_BYTES else interleave_integers
    if not can_interleave(first) or not all(same_format(first, weight) for weight in weights[1:]):
        return None
    if any(weight.shape[0] % TILE_ROWS for weight in weights[:-1]):
        return None
    rows, columns = sum(weight.shape[0] for weight in weights), first.shape[1]
    most = max(1, CHUNK_ELEMENTS // columns // TILE_ROWS) * TILE_ROWS
    made: dict[str, Tensor] = {}
    form, group, tile = "", 0, 0
    for weight in weights:
        for begin in range(0, weight.shape[0], most):
            form, group, parts = piece(weight, slice(begin, begin + most))
            for name, part in parts.items():
                if name not in made:
                    made[name] = empty_huge_pages((-(-rows // TILE_ROWS), *part.shape[1:]), part.dtype)
                made[name][tile : tile + len(part)] = part
            tile += len(parts["q"])
            on_read()
    if COLUMN_ORDER in first.parts:
        made[COLUMN_ORDER] = first.parts[COLUMN_ORDER]
    return QuantizedTensor(form, (rows, columns), made, group)


def can_interleave(weight: QuantizedTensor) -> bool:
    bits = {INT4: 4, INT8: 8}.get(weight.format)
    if bits is None:
        return weight.format in GGUF_INTERLEAVED_BYTES
    return interleaved_group(weight.group, weight.shape[1], bits) is not None


def same_format(first: QuantizedTensor, other: QuantizedTensor) -> bool:
    """May they be parts of one weight?"""
    kinds = ({name: part.dtype for name, part in weight.parts.items()} for weight in (first, other))
    same = (first.format, first.group, first.shape[1]) == (other.format, other.group, other.shape[1])
    return same and next(kinds) == next(kinds) and COLUMN_ORDER not in first.parts


InterleavedRows = tuple[str, int, dict[str, Tensor]]  # format, group, parts


def interleave_gguf(weight: QuantizedTensor, rows: slice) -> InterleavedRows:
    columns, packed = weight.shape[1], weight.parts[gguf.BLOCKS_PART][rows]
    blocks = packed.unflatten(1, (-1, gguf.BLOCK_TYPE_BY_NAME[weight.format].block_bytes))
    apart = gguf.UNPACKERS[weight.format](blocks.flatten(0, 1))
    count = len(packed)
    form = INT4_INTERLEAVED if weight.format in FOUR_BIT_GGUF else INT8_INTERLEAVED
    codes = apart.codes.reshape(count, columns)
    if form == INT8_INTERLEAVED:
        codes = codes.to(torch.int8)
    elif apart.minimum is None:
        codes = (codes + int4.INT4_ZERO_POINT).to(torch.uint8)
    found = {"scale": apart.scale, "minimum": apart.minimum}
    if apart.factor is not None:
        found = {"scale": apart.factor, "minimum": apart.minimum_factor, "block_scale": apart.scale}
        found["block_minimum"] = apart.minimum
    parts = {name: interleave_scales(part.reshape(count, -1)) for name, part in found.items() if part is not None}
    return form, columns // parts["scale"].shape[1], {"q": interleave_codes(codes, form), **parts}


def interleave_integers(weight: QuantizedTensor, rows: slice) -> InterleavedRows:
    columns, form = weight.shape[1], INT4_INTERLEAVED if weight.format == INT4 else INT8_INTERLEAVED
    group = interleaved_group(weight.group, columns, 4 if form == INT4_INTERLEAVED else 8)
    assert group is not None
    codes = weight.parts["q"][rows]
    if form == INT4_INTERLEAVED:
        codes = int4.unpack_int4(codes, columns)
    stored = interleaved_columns(group, columns)
    groups, codes = stored // group, F.pad(codes, (0, stored - columns))
    numbers = {name: weight.parts[name][rows] for name in ("scale", "zero") if name in weight.parts}
    wide = weight.group or columns
    again = -(-wide // group)  # how many parts a group is cut into
    cut = {name: part.repeat_interleave(again, 1)[:, :groups] for name, part in numbers.items()}
    cut = {name: F.pad(part, (0, groups - part.shape[1])) for name, part in cut.items()}
    return (
        form,
        group,
        {"q": interleave_codes(codes, form), **{name: interleave_scales(part) for name, part in cut.items()}},
    )


def interleave_codes(codes: Tensor, form: str) -> Tensor:
    """[rows, K], int8 or uint8 of 0 to 15 -> q"""
    if form == INT8_INTERLEAVED:
        return interleave_bytes(codes)
    low, high = codes.unflatten(1, (-1, 2, HALF_COLUMNS)).unbind(2)
    return interleave_bytes((low | (high << 4)).flatten(1))


def interleave_bytes(rows: Tensor) -> Tensor:
    """Bytes [rows, n] -> [tiles, n / 4, 16, 4]"""
    words = pad_rows(rows.contiguous()).view(torch.int32)
    return (
        words.unflatten(0, (-1, TILE_ROWS))
        .transpose(1, 2)
        .contiguous()
        .view(rows.dtype)
        .unflatten(-1, (TILE_ROWS, 4))
    )


def interleave_scales(part: Tensor) -> Tensor:
    """[rows, groups] -> [tiles, groups, 16]"""
    return pad_rows(part).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()


def pad_rows(rows: Tensor) -> Tensor:
    missing = -len(rows) % TILE_ROWS
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def deinterleave_scales(part: Tensor) -> Tensor:
    """[tiles, groups, 16] -> [rows, groups] float32"""
    return part.transpose(1, 2).flatten(0, 1).float()


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, computed in float32."""
    parts, (rows, columns) = weight.parts, weight.shape
    flat = parts["q"].transpose(1, 2).flatten(2).flatten(0, 1)  # [out, bytes]
    stored = flat.shape[1]
    if weight.format == INT4_INTERLEAVED:
        flat = torch.stack((flat & 15, flat >> 4), 1).unflatten(2, (-1, HALF_COLUMNS)).transpose(1, 2).flatten(1)
        stored *= 2
    scale = deinterleave_scales(parts["scale"])
    group = stored // scale.shape[1]
    if "block_scale" in parts:
        wide = stored // parts["block_scale"].shape[1] // group
        scale = expand_groups(deinterleave_scales(parts["block_scale"]), wide, scale.shape[1]) * scale
    middle = int4.INT4_ZERO_POINT if weight.format == INT4_INTERLEAVED and "minimum" not in parts else 0
    zero = expand_groups(deinterleave_scales(parts["zero"]), group, stored) if "zero" in parts else middle
    found = (flat.float() - zero) * expand_groups(scale, group, stored)
    if "minimum" in parts:
        minimum = deinterleave_scales(parts["minimum"])
        if "block_minimum" in parts:
            wide = stored // parts["block_minimum"].shape[1] // group
            minimum = expand_groups(deinterleave_scales(parts["block_minimum"]), wide, minimum.shape[1]) * minimum
        found -= expand_groups(minimum, group, stored)
    found = found[:rows, :columns]
    if COLUMN_ORDER in parts:
        found = torch.empty_like(found).index_copy_(1, parts[COLUMN_ORDER], found)
    return found.to(dtype)
