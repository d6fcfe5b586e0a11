"""The block formats of GGUF: unpacks rows of packed blocks.

Every format is value = scale * factor * code (- minimum * its factor) over small groups; they differ in the
positions of bits, which the functions show. Layouts: ggml's `ggml-quants.h`; the arithmetic is float32 in the
order of the `gguf` package, so that results are bit-equal to it. A row is a uint8 tensor; this module does not
read files.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.tensor import QuantizedTensor, device_table

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # OCP MX 1.0, multiplied by two
BLOCKS_PART = "blocks"  # the only part of a QuantizedTensor in these formats: uint8 [..., bytes of a row]

PLAIN_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SCALE_OFFSETS = {  # byte offsets of a block's float16 values
    **{"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "iq4_nl": (0,), "iq4_xs": (0,)},
    **{"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)},
}


class UnpackedBlocks(NamedTuple):
    """Unpacked blocks: value = scale * factor * code - minimum * minimum_factor, per group of a block."""

    codes: Tensor  # [n, elements] int8, or uint8 of 0 to 31
    scale: Tensor  # [n, 1] float16, or float32 if it is a power of two
    factor: Tensor | None = None  # [n, groups] int8
    minimum: Tensor | None = None  # [n, 1] float16
    minimum_factor: Tensor | None = None  # [n, groups] int8


# Maps uint8 [n, bytes of a block] to its parts, with elements in order.
Unpacker = Callable[[Tensor], UnpackedBlocks]


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return an entire weight, with its shape."""
    return dequantize_rows(weight.parts[BLOCKS_PART], weight.format, dtype)


def dequantize_rows(rows: Tensor, block_format: str, dtype: torch.dtype) -> Tensor:
    """Dequantize rows. rows: uint8 [..., bytes of a row] -> [..., elements of a row]"""
    block_type = BLOCK_TYPE_BY_NAME[block_format]
    blocks = rows.reshape(-1, block_type.block_bytes)
    columns = rows.shape[-1] // block_type.block_bytes * block_type.block_elements
    values = (
        blocks.view(PLAIN_DTYPES[block_format])
        if block_format in PLAIN_DTYPES
        else block_values(UNPACKERS[block_format](blocks))
    )
    return values.to(dtype).reshape(*rows.shape[:-1], columns)


def block_values(blocks: UnpackedBlocks) -> Tensor:
    """Return the values, float32 [n, elements]."""
    scale = blocks.scale.float()
    if blocks.factor is not None:
        scale = scale * blocks.factor
    values = blocks.codes.float().unflatten(1, (scale.shape[1], -1)).mul_(scale.unsqueeze(-1))
    if blocks.minimum is not None:
        minimum = blocks.minimum.float()
        if blocks.minimum_factor is not None:
            minimum = minimum * blocks.minimum_factor
        values.sub_(minimum.unsqueeze(-1))
    return values.flatten(1)


def row_scales(rows: Tensor, block_format: str) -> list[Tensor]:
    """Return views of packed rows that may be NaN or infinite: the scales, or all values of dense formats."""
    blocks = rows.reshape(-1, BLOCK_TYPE_BY_NAME[block_format].block_bytes)
    if block_format in PLAIN_DTYPES:
        return [blocks.view(PLAIN_DTYPES[block_format])]
    return [blocks[:, offset : offset + 2].view(torch.float16) for offset in SCALE_OFFSETS.get(block_format, ())]


def row_exponents(rows: Tensor) -> Tensor:
    """Return a view of the scales of MXFP4, uint8 [blocks]."""
    return rows.reshape(-1, BLOCK_TYPE_BY_NAME["mxfp4_gguf"].block_bytes)[:, 0]


def read_half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte offset of each block, [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16)


def nibbles(codes: Tensor) -> Tensor:
    """Split [..., m] to [..., 2, m]: low nibbles, then high nibbles."""
    return torch.stack((codes & 15, codes >> 4), -2)


def two_bit_codes(codes: Tensor) -> Tensor:
    """Split [..., m] to [..., 4, m]: the two lowest bits first."""
    return torch.stack((codes & 3, (codes >> 2) & 3, (codes >> 4) & 3, codes >> 6), -2)


def single_bits(codes: Tensor) -> Tensor:
    """Split [..., m] to [..., 8, m]: the lowest bit first."""
    return (codes.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]) & 1


def center_codes(codes: Tensor, middle: int) -> Tensor:
    """Shift codes of 0 .. 2 * middle - 1 to int8 centered at zero."""
    return codes.to(torch.int8) - middle


def q4_0(blocks: Tensor) -> UnpackedBlocks:
    """d f16, 32 codes of 4 bits: d * (code - 8)"""
    return UnpackedBlocks(center_codes(nibbles(blocks[:, 2:]).flatten(1), 8), read_half(blocks, 0))


def q4_1(blocks: Tensor) -> UnpackedBlocks:
    """d f16, m f16, 32 codes of 4 bits: d * code + m"""
    return UnpackedBlocks(nibbles(blocks[:, 4:]).flatten(1), read_half(blocks, 0), minimum=-read_half(blocks, 2))


def fifth_bits(packed: Tensor) -> Tensor:
    """Return 32 bits in 4 bytes as [n, 32], each shifted to the fifth bit."""
    return (single_bits(packed).transpose(1, 2) << 4).flatten(1)


def q5_0(blocks: Tensor) -> UnpackedBlocks:
    """d f16, 32 fifth bits, 32 codes of 4 bits: d * (code - 16)"""
    return UnpackedBlocks(
        center_codes(nibbles(blocks[:, 6:]).flatten(1) | fifth_bits(blocks[:, 2:6]), 16), read_half(blocks, 0)
    )


def q5_1(blocks: Tensor) -> UnpackedBlocks:
    """d f16, m f16, 32 fifth bits, 32 codes of 4 bits: d * code + m"""
    codes = nibbles(blocks[:, 8:]).flatten(1) | fifth_bits(blocks[:, 4:8])
    return UnpackedBlocks(codes, read_half(blocks, 0), minimum=-read_half(blocks, 2))


def q8_0(blocks: Tensor) -> UnpackedBlocks:
    """d f16, 32 int8: d * code"""
    return UnpackedBlocks(blocks[:, 2:].view(torch.int8), read_half(blocks, 0))


def q2_k(blocks: Tensor) -> UnpackedBlocks:
    """16 bytes of scale and minimum (4 bits each), 256 codes of 2 bits, d f16, dmin f16"""
    codes = two_bit_codes(blocks[:, 16:80].unflatten(1, (2, 32))).flatten(1)
    scale, minimum = (packed.to(torch.int8) for packed in (blocks[:, :16] & 15, blocks[:, :16] >> 4))
    return UnpackedBlocks(codes, read_half(blocks, 80), scale, read_half(blocks, 82), minimum)


def q3_k(blocks: Tensor) -> UnpackedBlocks:
    """256 high bits, 256 codes of 2 bits, 16 scales of 6 bits, d f16: d * (scale - 32) * (code - 4 * not high)"""
    low = nibbles(blocks[:, 96:104]).flatten(1)
    high = two_bit_codes(blocks[:, 104:108]).flatten(1)
    third_bits = single_bits(blocks[:, :32]).flatten(1) << 2
    codes = two_bit_codes(blocks[:, 32:96].unflatten(1, (2, 32))).flatten(1) | third_bits
    return UnpackedBlocks(center_codes(codes, 4), read_half(blocks, 108), center_codes(low | (high << 4), 32))


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes to 8 scales and 8 minima of 6 bits, int8 [n, 8] each.

    The high bits of the last four of both are stored with the first four.
    """
    scale, minimum, low_bits = packed.unflatten(1, (3, 4)).unbind(1)
    return (
        torch.cat((scale & 63, (low_bits & 15) | ((scale >> 2) & 48)), 1).view(torch.int8),
        torch.cat((minimum & 63, (low_bits >> 4) | ((minimum >> 2) & 48)), 1).view(torch.int8),
    )


def unpack_k_quant(blocks: Tensor, codes: Tensor) -> UnpackedBlocks:
    """Unpack the common part of Q4_K and Q5_K: d f16, dmin f16, 12 bytes of scales. codes: [n, 8, 32]"""
    scale, minimum = scales_and_minima(blocks[:, 4:16])
    return UnpackedBlocks(codes.flatten(1), read_half(blocks, 0), scale, read_half(blocks, 2), minimum)


def q4_k(blocks: Tensor) -> UnpackedBlocks:
    """d, dmin, scales as in `unpack_k_quant`, 256 codes of 4 bits in runs of 32"""
    return unpack_k_quant(blocks, nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1, 2))


def q5_k(blocks: Tensor) -> UnpackedBlocks:
    """d, dmin, scales as in `unpack_k_quant`, 256 fifth bits, 256 codes of 4 bits in runs of 32"""
    codes = nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1, 2)
    return unpack_k_quant(blocks, codes | (single_bits(blocks[:, 16:48]) << 4))


def q6_k(blocks: Tensor) -> UnpackedBlocks:
    """256 codes of 4 bits, 256 of 2 bits above them, 16 int8 scales, d f16: d * scale * (code - 32)"""
    low = nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    high = two_bit_codes(blocks[:, 128:192].unflatten(1, (2, 32))).flatten(1) << 4
    return UnpackedBlocks(
        center_codes(low | high, 32), read_half(blocks, 208), blocks[:, 192:208].view(torch.int8)
    )


def lookup_codes(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    table = device_table(values, torch.int8, codes.device)
    return table.index_select(0, codes.int().flatten()).view_as(codes)


def iq4_nl(blocks: Tensor) -> UnpackedBlocks:
    """d f16, 32 codes of 4 bits into a table: d * table[code]"""
    return UnpackedBlocks(lookup_codes(nibbles(blocks[:, 2:]).flatten(1), IQ4_CODES), read_half(blocks, 0))


def iq4_xs(blocks: Tensor) -> UnpackedBlocks:
    """d f16, 8 scales of 6 bits (2 high bits in 2 bytes, 4 low in 4), 256 codes of 4 bits into the table"""
    low = nibbles(blocks[:, 4:8]).transpose(1, 2).flatten(1)
    high = two_bit_codes(blocks[:, 2:4]).transpose(1, 2).flatten(1)
    codes = nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(1)
    return UnpackedBlocks(
        lookup_codes(codes, IQ4_CODES), read_half(blocks, 0), center_codes(low | (high << 4), 32)
    )


def mxfp4_gguf(blocks: Tensor) -> UnpackedBlocks:
    """e uint8, 32 codes of 4 bits: 2^(e - 128) * doubled e2m1. Source: OCP Microscaling Formats 1.0"""
    exponent = blocks[:, :1].int()
    # The bits of a float32; the two smallest exponents are subnormal.
    scale = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return UnpackedBlocks(lookup_codes(nibbles(blocks[:, 1:]).flatten(1), E2M1_DOUBLED), scale.view(torch.float32))


UNPACKERS: dict[str, Unpacker] = {
    unpack.__name__: unpack
    for unpack in (
        *(q4_0, q4_1, q5_0, q5_1, q8_0),
        *(q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4_gguf),
    )
}
FORMATS = frozenset((*PLAIN_DTYPES, *UNPACKERS))
