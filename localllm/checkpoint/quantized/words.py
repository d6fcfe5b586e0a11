"""Parts that the layouts with codes in int32 words share, with the first code in the lowest bits.

The little-endian bytes of words are pairs of INT4 codes, or INT8 codes. Also handles zero points and column
orders.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import WORD_BITS, Scheme
from localllm.checkpoint.tensors import Weights, check_finite
from localllm.errors import DamagedModel
from localllm.quant.formats.groups import pack_int4, unpack_int4
from localllm.quant.packing import INT4, INT8
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

WORD_DTYPES = ("I32",)
SCALE_DTYPES = ("F32", "F16", "BF16")  # that kernels read and writers store
SIGN_BIT = 0x80  # flipping it converts between codes of 0 to 255 and -128 to 127
UNSET_GROUP = -1  # in files whose columns keep their order


def damaged(what: str) -> DamagedModel:
    return DamagedModel(what, "fetch the model again")


def check_multiple(weights: Weights, name: str, size: int, unit: int, what: str) -> None:
    """Raise DamagedModel if rows or columns are not a multiple of what the layout stores together."""
    if size % unit:
        raise damaged(
            f"{weights.stored_name(name)!r} has {size} {what}, but its layout needs a multiple of {unit}"
        )


def codes_per_word(bits: int) -> int:
    return WORD_BITS // bits


def as_bytes(words: Tensor) -> Tensor:
    """Reinterpret int32 [rows, n] as uint8 [rows, 4 n]."""
    return words.flatten().contiguous().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])


def unpack_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 [rows, n] to uint8 [rows, count], codes of 0 to 15 or 255."""
    packed = as_bytes(words)
    return unpack_int4(packed, count) if bits == 4 else packed[:, :count]


def take_scales(weights: Weights, name: str, shape: tuple[int, int]) -> Tensor:
    scales = weights.take(name, shape, SCALE_DTYPES)
    check_finite(weights.stored_name(name), scales.float())
    return scales


def assemble(
    weights: Weights,
    name: str,
    shape: tuple[int, int],
    scheme: Scheme,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None = None,
) -> QuantizedTensor:
    """Build a quantized tensor from unpacked parts.

    packed: uint8 [out, ceil(in / 2)] in the INT4 layout, or [out, in] with codes of 0 to 255; scale: [out,
    groups]; zero: uint8 [out, groups], in codes; order: [in] int64. Raises DamagedModel for zero points that
    contradict config.json.
    """
    bits, columns = scheme.bits, shape[1]
    if order is not None:
        codes = unpack_int4(packed, columns) if bits == 4 else packed
        codes = codes.index_select(1, order)
        packed = pack_int4(codes) if bits == 4 else codes
    if zero is not None and scheme.symmetric:
        if (zero != 1 << (bits - 1)).any():
            raise damaged(f"{weights.stored_name(name)!r} has zero points, but config.json says symmetric")
        zero = None
    parts = {"q": packed if bits == 4 else to_signed(packed), "scale": scale}
    if zero is not None:
        parts["zero"] = zero if bits == 4 else to_signed(zero)
    if order is not None:
        parts[COLUMN_ORDER] = order
    group = scheme.group_size if scheme.group_count(columns) > 1 else None
    return QuantizedTensor(INT4 if bits == 4 else INT8, shape, parts, group)


def to_signed(codes: Tensor) -> Tensor:
    """Convert codes of 0 to 255 to int8 of -128 to 127."""
    return (codes ^ SIGN_BIT).view(torch.int8)


def column_order(name: str, group_of: Tensor, scheme: Scheme) -> Tensor | None:
    """Return the order that makes the columns of a group adjacent; None if they are. group_of: int32 [in]

    Raises DamagedModel for invalid group numbers, or groups of different sizes.
    """
    columns = len(group_of)
    groups, size = scheme.group_count(columns), scheme.group_size or columns
    if (group_of == UNSET_GROUP).all():
        return None
    smallest, largest = (int(end) for end in torch.aminmax(group_of))
    if smallest < 0 or largest >= groups:
        raise damaged(f"{name!r} has the group {smallest if smallest < 0 else largest}, but there are {groups}")
    group_in_order = torch.arange(columns, dtype=group_of.dtype, device=group_of.device) // size
    if torch.equal(group_of, group_in_order):
        return None
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order], group_in_order):
        raise damaged(f"{name!r} has groups of sizes other than {size} columns")
    return order
