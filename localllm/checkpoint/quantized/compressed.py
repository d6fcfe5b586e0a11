"""compressed-tensors, `pack-quantized`: `X.weight_packed` int32 [out, ceil(in / 8)] (in / 4 of 8 bits), codes plus
8 or 128; `X.weight_shape` [2]; `X.weight_scale` [out, groups]; `X.weight_zero_point` int32
[ceil(out / 8), groups], packed likewise down the rows; `X.weight_g_idx` int32 [in], the group of each column.

Source: compressed-tensors, `compressors/pack_quantized`.
"""

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
from localllm.checkpoint.safetensors import Weights
from localllm.quant.tensor import QuantizedTensor


def take_packed(
    weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization
) -> QuantizedTensor:
    rows, columns = shape
    scheme = find_compressed_scheme(weights, name, columns, quantization)
    run, groups = codes_per_word(scheme.bits), scheme.group_count(columns)
    words = weights.take(f"{name}.weight_packed", (rows, -(-columns // run)), WORD_DTYPES)
    scale = take_scales(weights, f"{name}.weight_scale", (rows, groups))
    if weights.has(f"{name}.weight_shape"):
        stated = weights.take(f"{name}.weight_shape", (2,), ("I64", "I32")).tolist()
        if stated != list(shape):
            what = weights.stored_name(f"{name}.weight_shape")
            raise damaged(f"the tensor {what!r} says {stated} and config.json asks for {list(shape)}")
    order = zero = None
    if weights.has(f"{name}.weight_g_idx"):
        group_of = weights.take(f"{name}.weight_g_idx", (columns,), WORD_DTYPES)
        order = column_order(weights.stored_name(f"{name}.weight_g_idx"), group_of, scheme)
    if not scheme.symmetric or weights.has(f"{name}.weight_zero_point"):
        zeros = weights.take(f"{name}.weight_zero_point", (-(-rows // run), groups), WORD_DTYPES)
        zero = unpack_codes(zeros.T, scheme.bits, rows).T.contiguous()
    size = -(-columns // 2) if scheme.bits == 4 else columns
    packed = as_bytes(words)[:, :size]
    return assemble(weights, name, shape, scheme, packed, scale, zero, order)


def find_compressed_scheme(weights: Weights, name: str, columns: int, quantization: Quantization) -> Scheme:
    """The one of config_groups that the shapes speak of."""
    packed, scale = weights.stored_header(f"{name}.weight_packed"), weights.stored_header(f"{name}.weight_scale")
    symmetric = not weights.has(f"{name}.weight_zero_point")
    if packed and scale and len(packed.shape) == len(scale.shape) == 2:
        for bits in (4, 8):
            if packed.shape[1] == -(-columns // codes_per_word(bits)):
                groups = scale.shape[1]
                known = {"bits": bits, "words": True, "floats": False}
                found = quantization.find_scheme(
                    columns, groups, **known, symmetric=symmetric
                ) or quantization.find_scheme(columns, groups, **known)
                if found:
                    return found
    alone = [scheme for scheme in quantization.schemes if scheme.words]
    if len(alone) == 1:  # the shapes are told apart from its own when they are taken
        return alone[0]
    what = weights.stored_name(f"{name}.weight_packed")
    raise damaged(f"the shapes of {what!r} and its scales are none that config.json's groups describe")
