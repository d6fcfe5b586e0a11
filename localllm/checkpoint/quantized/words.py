"""What layouts share that pack codes in int32 words, the first in the lowest bits: the words' bytes, lowest first,
are the codes of INT4 two by two and those of INT8 one by one. And zero points, and orders of columns.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import WORD_BITS, Scheme
from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.errors import DamagedModel
from localllm.quant.formats import int4, int8
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

WORD_DTYPES = ("I32",)
SCALE_DTYPES = ("F32", "F16", "BF16")  # what kernels read, and what writers write
SIGN_BIT = 0x80  # of a byte: what tells codes of 0 to 255 from those of -128 to 127
UNSET_GROUP = -1  # the group of a column in a file that kept the order


def damaged(what: str) -> DamagedModel:
    return DamagedModel(what, "fetch the model again")


def check_multiple(weights: Weights, name: str, size: int, unit: int, what: str) -> None:
    """Raises DamagedModel where rows or columns are no multiple of what the layout stores together."""
    if size % unit:
        raise damaged(
            f"{weights.stored_name(name)!r} stands for {size} {what}, and its layout for multiples of {unit}"
        )


def codes_per_word(bits: int) -> int:
    return WORD_BITS // bits


def as_bytes(words: Tensor) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 4 n]"""
    return words.flatten().contiguous().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])


def unpack_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, count], codes of 0 to 15 or to 255."""
    packed = as_bytes(words)
    return int4.unpack_int4(packed, count) if bits == 4 else packed[:, :count]


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
    """packed: uint8 [out, ceil(in / 2)] in INT4's own layout, or [out, in] with codes of 0 to 255; scale: [out,
    groups]; zero: uint8 [out, groups], in codes; order: [in] int64.

    Raises DamagedModel for zero points that config.json says there are not.
    """
    bits, columns = scheme.bits, shape[1]
    if order is not None:
        codes = int4.unpack_int4(packed, columns) if bits == 4 else packed
        codes = codes.index_select(1, order)
        packed = int4.pack_int4(codes) if bits == 4 else codes
    if zero is not None and scheme.symmetric:
        if (zero != 1 << (bits - 1)).any():
            raise damaged(f"{weights.stored_name(name)!r} has zero points, which config.json says that it has not")
        zero = None
    parts = {"q": packed if bits == 4 else to_signed(packed), "scale": scale}
    if zero is not None:
        parts["zero"] = zero if bits == 4 else to_signed(zero)
    if order is not None:
        parts[COLUMN_ORDER] = order
    group = scheme.group_size if scheme.group_count(columns) > 1 else None
    return QuantizedTensor(int4.INT4_FORMAT if bits == 4 else int8.INT8_FORMAT, shape, parts, group)


def to_signed(codes: Tensor) -> Tensor:
    """Codes of 0 to 255 -> int8 of -128 to 127."""
    return (codes ^ SIGN_BIT).view(torch.int8)


def column_order(name: str, group_of: Tensor, scheme: Scheme) -> Tensor | None:
    """The order that brings the columns of a group together; None where they are. group_of: int32 [in]

    Raises DamagedModel for groups that are none, or of other sizes than all groups have.
    """
    columns = len(group_of)
    groups, size = scheme.group_count(columns), scheme.group_size or columns
    if (group_of == UNSET_GROUP).all():
        return None
    least, most = (int(end) for end in torch.aminmax(group_of))
    if least < 0 or most >= groups:
        raise damaged(f"{name!r} has the group {least if least < 0 else most}, and there are {groups}")
    in_turn = torch.arange(columns, dtype=group_of.dtype, device=group_of.device) // size
    if torch.equal(group_of, in_turn):
        return None
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order], in_turn):
        raise damaged(f"{name!r} has groups of other sizes than {size} columns")
    return order
