"""compressed-tensors, `pack-quantized`: `X.weight_packed` int32 [out, ceil(in / 8)] (in / 4 for 8 bits), codes
plus 8 or 128; `X.weight_shape` [2]; `X.weight_scale` [out, groups]; `X.weight_zero_point` int32 [ceil(out / 8),
groups], packed likewise along the rows, or int8 [out, groups], not packed, if groups are blocks of one row;
`X.weight_g_idx` int32 [in], the group of each column.

Source: compressed-tensors, `compressors/pack_quantized`.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import Quantization, Scheme
from localllm.checkpoint.quantized.words import (
    WORD_DTYPES,
    as_bytes,
    assemble,
    codes_per_word,
    column_order,
    damaged,
    take_scales,
    unpack_codes,
)
from localllm.checkpoint.tensors import Weights
from localllm.quant.tensor import QuantizedTensor


def take_packed(
    weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization
) -> QuantizedTensor:
    rows, columns = shape
    scheme = find_compressed_scheme(weights, name, columns, quantization)
    codes_in_word, groups = codes_per_word(scheme.bits), scheme.group_count(columns)
    words = weights.take(f"{name}.weight_packed", (rows, -(-columns // codes_in_word)), WORD_DTYPES)
    scale = take_scales(weights, f"{name}.weight_scale", (rows, groups))
    if weights.has(f"{name}.weight_shape"):
        stored_shape = weights.take(f"{name}.weight_shape", (2,), ("I64", "I32")).tolist()
        if stored_shape != list(shape):
            stored_name = weights.stored_name(f"{name}.weight_shape")
            raise damaged(f"the tensor {stored_name!r} is {stored_shape}, but config.json implies {list(shape)}")
    order = zero = None
    if weights.has(f"{name}.weight_g_idx"):
        group_of = weights.take(f"{name}.weight_g_idx", (columns,), WORD_DTYPES)
        order = column_order(weights.stored_name(f"{name}.weight_g_idx"), group_of, scheme)
    if not scheme.symmetric or weights.has(f"{name}.weight_zero_point"):
        zero = take_zeros(weights, f"{name}.weight_zero_point", (rows, groups), scheme.bits)
    size = -(-columns // 2) if scheme.bits == 4 else columns
    packed = as_bytes(words)[:, :size]
    return assemble(weights, name, shape, scheme, packed, scale, zero, order)


def take_zeros(weights: Weights, name: str, shape: tuple[int, int], bits: int) -> Tensor:
    """Return zero points, uint8 [out, groups], codes of 0 to 15 or 255."""
    rows, groups = shape
    stored = weights.stored_header(name)
    if stored and stored.dtype == "I8":
        zeros, middle = weights.take(name, shape, ("I8",)).int(), 2 ** (bits - 1)
        if ((zeros < -middle) | (zeros >= middle)).any():
            raise damaged(f"{weights.stored_name(name)!r} has zero points of more than {bits} bits")
        return (zeros + middle).to(torch.uint8)
    words = weights.take(name, (-(-rows // codes_per_word(bits)), groups), WORD_DTYPES)
    return unpack_codes(words.T, bits, rows).T.contiguous()


def find_compressed_scheme(weights: Weights, name: str, columns: int, quantization: Quantization) -> Scheme:
    """Return the scheme of config_groups that matches the shapes."""
    packed, scale = weights.stored_header(f"{name}.weight_packed"), weights.stored_header(f"{name}.weight_scale")
    symmetric = not weights.has(f"{name}.weight_zero_point")
    if packed and scale and len(packed.shape) == len(scale.shape) == 2:
        for bits in (4, 8):
            if packed.shape[1] == -(-columns // codes_per_word(bits)):
                groups = scale.shape[1]
                known = {"bits": bits, "words": True, "floats": False}
                scheme = quantization.find_scheme(
                    columns, groups, **known, symmetric=symmetric
                ) or quantization.find_scheme(columns, groups, **known)
                if scheme:
                    return scheme
    schemes = [scheme for scheme in quantization.schemes if scheme.words]
    if len(schemes) == 1:  # shapes are checked against it when the tensors are taken
        return schemes[0]
    stored_name = weights.stored_name(f"{name}.weight_packed")
    raise damaged(f"the shapes of {stored_name!r} and its scales match none of config.json's groups")
