"""INT4, INT6 and INT8 in the interleaved layout of CPU kernels: 16 rows side by side, one in each lane of a
vector.

A tile is 16 rows, stored as the vectors of all its columns in sequence. In INT8, a vector holds columns 4c to
4c + 3 of each row; in INT4, the low nibbles hold columns 32u + 4c to 32u + 4c + 3 and the high nibbles those 16
further on, as in GGUF's Q4_0. In INT6, for GGUF's formats of 5 and 6 bits, three vectors hold 16 columns: the
lower six bits of vector i are columns 16u + 4i to 16u + 4i + 3, the upper two bits of all three columns 16u + 12
to 16u + 15, lowest bits first. Incomplete tiles and groups are padded with zeros.

Parts, with K the columns padded to whole groups:
- q: int8 [tiles, K / 4, 16, 4], or uint8 [tiles, K / 8, 16, 4] with codes of 0 to 15, or uint8 [tiles, 3 K / 16,
  16, 4] with codes of 0 to 63;
- scale: [tiles, groups, 16] in float16, bfloat16 or float32;
- zero: [tiles, groups, 16], int8 or uint8 like q; or minimum, like scale: w = code * scale - minimum. Without
  either, the zero point of INT4 is 8, of INT6 32;
- for GGUF's K-quants, scale and minimum are int8 factors of block_scale and block_minimum, float16 [tiles, blocks,
  16];
- columns: see `groups.py`.
"""

import ctypes
import math
import mmap
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quant.formats import gguf
from localllm.quant.formats.groups import INT4_ZERO_POINT, INT6_ZERO_POINT, expand_groups, unpack_int4
from localllm.quant.packing import (
    GGUF_INTERLEAVED_BYTES,
    INT4,
    INT4_INTERLEAVED,
    INT6_INTERLEAVED,
    INT8,
    INT8_INTERLEAVED,
    TILE_ROWS,
    interleaved_columns,
    interleaved_group,
)
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor, can_stack, no_op

HUGE_PAGE_BYTES = 2**21
HALF_COLUMNS = 16  # between the low and the high nibble of a byte
FOUR_BIT_GGUF = ("q4_0", "q4_1", "q2_k", "q3_k", "q4_k")
SIX_BIT_GGUF = ("q5_0", "q5_1", "q5_k", "q6_k")
ZERO_POINTS = {INT4_INTERLEAVED: INT4_ZERO_POINT, INT6_INTERLEAVED: INT6_ZERO_POINT}  # where there is no minimum
CHUNK_ELEMENTS = 2**21  # unpacked at a time, to stay in the cache


def interleave(*weights: QuantizedTensor, on_read: Callable[[], None] = no_op) -> QuantizedTensor | None:
    """Return the weights stacked by rows in interleaved layout; None if they cannot be interleaved or stacked.

    The values are unchanged. on_read: called whenever a part of the weights has been read.
    """
    first = weights[0]
    interleave_part = interleave_gguf if first.format in GGUF_INTERLEAVED_BYTES else interleave_integers
    if not can_interleave(first) or not all(can_stack(first, weight) for weight in weights[1:]):
        return None
    if any(weight.shape[0] % TILE_ROWS for weight in weights[:-1]):
        return None
    rows, columns = sum(weight.shape[0] for weight in weights), first.shape[1]
    max_rows = max(1, CHUNK_ELEMENTS // columns // TILE_ROWS) * TILE_ROWS
    packed: dict[str, Tensor] = {}
    packed_format, group, tile = "", 0, 0
    for weight in weights:
        for begin in range(0, weight.shape[0], max_rows):
            packed_format, group, parts = interleave_part(weight, slice(begin, begin + max_rows))
            for name, part in parts.items():
                if name not in packed:
                    packed[name] = empty_huge_pages((-(-rows // TILE_ROWS), *part.shape[1:]), part.dtype)
                packed[name][tile : tile + len(part)] = part
            tile += len(parts["q"])
            on_read()
    if COLUMN_ORDER in first.parts:
        packed[COLUMN_ORDER] = first.parts[COLUMN_ORDER]
    return QuantizedTensor(packed_format, (rows, columns), packed, group)


def can_interleave(weight: QuantizedTensor) -> bool:
    bits = {INT4: 4, INT8: 8}.get(weight.format)
    if bits is None:
        return weight.format in GGUF_INTERLEAVED_BYTES
    return interleaved_group(weight.group, weight.shape[1], bits) is not None


InterleavedRows = tuple[str, int, dict[str, Tensor]]  # format, group, parts


def interleave_gguf(weight: QuantizedTensor, rows: slice) -> InterleavedRows:
    columns, packed = weight.shape[1], weight.parts[gguf.BLOCKS_PART][rows]
    blocks = packed.unflatten(1, (-1, gguf.BLOCK_TYPE_BY_NAME[weight.format].block_bytes))
    unpacked = gguf.UNPACKERS[weight.format](blocks.flatten(0, 1))
    count = len(packed)
    packed_format = gguf_interleaved_format(weight.format)
    codes = unpacked.codes.reshape(count, columns)
    if packed_format == INT8_INTERLEAVED:
        codes = codes.to(torch.int8)
    elif unpacked.minimum is None:
        codes = (codes + ZERO_POINTS[packed_format]).to(torch.uint8)
    scales = {"scale": unpacked.scale, "minimum": unpacked.minimum}
    if unpacked.factor is not None:
        scales = {"scale": unpacked.factor, "minimum": unpacked.minimum_factor, "block_scale": unpacked.scale}
        scales["block_minimum"] = unpacked.minimum
    parts = {name: interleave_scales(part.reshape(count, -1)) for name, part in scales.items() if part is not None}
    return (
        packed_format,
        columns // parts["scale"].shape[1],
        {"q": interleave_codes(codes, packed_format), **parts},
    )


def gguf_interleaved_format(block_format: str) -> str:
    """Return the interleaved format of GGUF blocks."""
    if block_format in FOUR_BIT_GGUF:
        return INT4_INTERLEAVED
    return INT6_INTERLEAVED if block_format in SIX_BIT_GGUF else INT8_INTERLEAVED


def interleave_integers(weight: QuantizedTensor, rows: slice) -> InterleavedRows:
    columns, packed_format = weight.shape[1], INT4_INTERLEAVED if weight.format == INT4 else INT8_INTERLEAVED
    group = interleaved_group(weight.group, columns, 4 if packed_format == INT4_INTERLEAVED else 8)
    assert group is not None
    codes = weight.parts["q"][rows]
    if packed_format == INT4_INTERLEAVED:
        codes = unpack_int4(codes, columns)
    padded_columns = interleaved_columns(group, columns)
    groups, codes = padded_columns // group, F.pad(codes, (0, padded_columns - columns))
    scales = {name: weight.parts[name][rows] for name in ("scale", "zero") if name in weight.parts}
    stored_group = weight.group or columns
    repeats = -(-stored_group // group)  # parts that a group is divided into
    repeated = {name: part.repeat_interleave(repeats, 1)[:, :groups] for name, part in scales.items()}
    repeated = {name: F.pad(part, (0, groups - part.shape[1])) for name, part in repeated.items()}
    return (
        packed_format,
        group,
        {
            "q": interleave_codes(codes, packed_format),
            **{name: interleave_scales(part) for name, part in repeated.items()},
        },
    )


def interleave_codes(codes: Tensor, packed_format: str) -> Tensor:
    """Interleave codes [rows, K], int8 or uint8 of 0 to 15 or 63, to q."""
    if packed_format == INT8_INTERLEAVED:
        return interleave_bytes(codes)
    if packed_format == INT6_INTERLEAVED:
        first, last = codes.to(torch.uint8).unflatten(1, (-1, 4, 4)).split((3, 1), 2)  # [rows, K / 16, 3, 4]
        return interleave_bytes((first | ((last >> LAST_CODE_SHIFTS) & 3) << 6).flatten(1))
    low, high = codes.unflatten(1, (-1, 2, HALF_COLUMNS)).unbind(2)
    return interleave_bytes((low | (high << 4)).flatten(1))


# Shifts that take the code of columns 16u + 12 .. 15 to its bits in each of three vectors.
LAST_CODE_SHIFTS = torch.tensor([[0], [2], [4]], dtype=torch.uint8)


def interleave_bytes(rows: Tensor) -> Tensor:
    """Interleave bytes [rows, n] -> [tiles, n / 4, 16, 4]."""
    words = pad_rows(rows.contiguous()).view(torch.int32)
    return (
        words.unflatten(0, (-1, TILE_ROWS))
        .transpose(1, 2)
        .contiguous()
        .view(rows.dtype)
        .unflatten(-1, (TILE_ROWS, 4))
    )


def interleave_scales(part: Tensor) -> Tensor:
    """Interleave [rows, groups] -> [tiles, groups, 16]."""
    return pad_rows(part).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()


def pad_rows(rows: Tensor) -> Tensor:
    missing = -len(rows) % TILE_ROWS
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, computed in float32."""
    parts = {
        name: part if name == COLUMN_ORDER else part.transpose(1, 2).flatten(0, 1)[: weight.shape[0]]
        for name, part in weight.parts.items()
    }
    return dequantize_parts(weight, parts, dtype)


def dequantize_rows(weight: QuantizedTensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows with these indices in `dtype`. index: [n] int64 -> [n, in]"""
    tile, lane, q = index // TILE_ROWS, index % TILE_ROWS, weight.parts["q"]
    parts = {
        name: part if name == COLUMN_ORDER else part[tile, :, lane]
        for name, part in weight.parts.items()
        if name != "q"
    }
    words = q.view(torch.int32)[tile, :, lane, 0]  # four columns at once
    parts["q"] = words.view(q.dtype).unflatten(-1, (-1, 4))
    return dequantize_parts(weight, parts, dtype)


def dequantize_parts(weight: QuantizedTensor, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return values [rows, in]. parts: those of the weight with whole rows; q is [rows, vectors, 4]"""
    codes = parts["q"].flatten(1)  # [rows, bytes]
    padded_columns = codes.shape[1]
    if weight.format == INT4_INTERLEAVED:
        codes = (
            torch.stack((codes & 15, codes >> 4), 1).unflatten(2, (-1, HALF_COLUMNS)).transpose(1, 2).flatten(1)
        )
        padded_columns *= 2
    elif weight.format == INT6_INTERLEAVED:
        vectors = codes.unflatten(1, (-1, 3, 4))
        last = ((vectors >> 6) << LAST_CODE_SHIFTS).sum(2, keepdim=True, dtype=torch.uint8)
        codes = torch.cat((vectors & 63, last), 2).flatten(1)
        padded_columns = codes.shape[1]
    scale = parts["scale"].float()
    group = padded_columns // scale.shape[1]
    if "block_scale" in parts:
        block_groups = padded_columns // parts["block_scale"].shape[1] // group
        scale = expand_groups(parts["block_scale"].float(), block_groups, scale.shape[1]) * scale
    zero_point = 0 if "minimum" in parts else ZERO_POINTS.get(weight.format, 0)
    zero = expand_groups(parts["zero"].float(), group, padded_columns) if "zero" in parts else zero_point
    values = (codes.float() - zero) * expand_groups(scale, group, padded_columns)
    if "minimum" in parts:
        minimum = parts["minimum"].float()
        if "block_minimum" in parts:
            block_groups = padded_columns // parts["block_minimum"].shape[1] // group
            minimum = expand_groups(parts["block_minimum"].float(), block_groups, minimum.shape[1]) * minimum
        values -= expand_groups(minimum, group, padded_columns)
    values = values[:, : weight.shape[1]]
    if COLUMN_ORDER in parts:
        values = torch.empty_like(values).index_copy_(1, parts[COLUMN_ORDER], values)
    return values.to(dtype)


def empty_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized CPU tensor for data that is read repeatedly, in huge pages if the system provides
    them.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Only advice: the system may use small pages. Memory in front of the first huge page is never touched.
    buffer = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
    begin = -buffer.data_ptr() % HUGE_PAGE_BYTES
    tensor = buffer[begin : begin + size].view(dtype).view(shape)
    length = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor
