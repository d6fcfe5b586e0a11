"""Reads a quantized matrix of a checkpoint as a `QuantizedTensor`, in every published layout.

The names of a matrix's tensors determine its layout; config.json must agree. A section per layout: AWQ, GPTQ and
compressed-tensors, with codes in int32 words; one byte per element; blocks of MXFP4 and GGUF. `take_quantized`, at
the end, finds the layout of a matrix.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import WORD_BITS, Quantization, Scheme
from localllm.checkpoint.tensors import FLOATS, Weights, check_finite
from localllm.errors import DamagedModel
from localllm.quant.formats import gguf
from localllm.quant.formats.groups import MXFP4_GROUP, MXFP4_NAN_SCALE, pack_int4, unpack_int4
from localllm.quant.packing import FP8, INT4, INT8, MXFP4, W8A8
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

# Codes in int32 words, the first code in the lowest bits: parts that AWQ, GPTQ and compressed-tensors share. The
# little-endian bytes of words are pairs of INT4 codes, or INT8 codes.

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
        raise damaged(f"{name!r} has groups of other sizes than {size} columns")
    return order


# AutoAWQ's `gemm` layout: `X.qweight` int32 [in, out / 8], `X.qzeros` int32 [groups, out / 8], `X.scales`
# [groups, out]. The nibbles of a word, from the lowest, are rows 0, 2, 4, 6, 1, 3, 5, 7 of its eight rows.
#
# Source: AutoAWQ, `awq/utils/packing_utils.py`.

AWQ_NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight rows
AWQ_ROWS_PER_WORD = len(AWQ_NIBBLE_OF_ROW)


def take_awq(weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedTensor:
    [scheme] = quantization.schemes
    rows, columns = shape
    check_multiple(weights, f"{name}.qweight", rows, AWQ_ROWS_PER_WORD, "rows")
    check_multiple(weights, f"{name}.qweight", columns, scheme.group_size or columns, "columns")
    groups = scheme.group_count(columns)
    qweight = weights.take(f"{name}.qweight", (columns, rows // AWQ_ROWS_PER_WORD), WORD_DTYPES)
    scales = take_scales(weights, f"{name}.scales", (groups, rows))
    zero = None
    if weights.has(f"{name}.qzeros") or not scheme.symmetric:
        zero = unpack_awq_rows(
            weights.take(f"{name}.qzeros", (groups, rows // AWQ_ROWS_PER_WORD), WORD_DTYPES)
        ).T.contiguous()
    return assemble(weights, name, shape, scheme, repack_awq_rows(qweight), scales.T.contiguous(), zero)


def repack_awq_rows(words: Tensor) -> Tensor:
    """Convert int32 [in, out / 8] to the INT4 layout, uint8 [out, ceil(in / 2)].

    It works on bytes, because a checkpoint has billions of codes.
    """
    words = torch.nn.functional.pad(words, (0, 0, 0, len(words) % 2))
    first, second = (as_bytes(half.T).unflatten(1, (-1, 4)) for half in (words[::2], words[1::2]))
    nibbles = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)  # each [out / 8, ceil(in / 2), 4]
    packed = first.new_empty(len(first), AWQ_ROWS_PER_WORD, first.shape[1])
    for row, nibble in enumerate(AWQ_NIBBLE_OF_ROW):
        packed[:, row] = nibbles[nibble % 2][..., nibble // 2]
    return packed.flatten(0, 1)


def unpack_awq_rows(words: Tensor) -> Tensor:
    """Convert int32 [n, out / 8] to codes, uint8 [n, out]."""
    codes = unpack_codes(words, 4, AWQ_ROWS_PER_WORD * words.shape[1]).unflatten(1, (-1, AWQ_ROWS_PER_WORD))
    return codes[..., torch.tensor(AWQ_NIBBLE_OF_ROW)].flatten(1)


# GPTQ's layout: `X.qweight` int32 [in / 8, out] (in / 4 for 8 bits), a word per run of columns; `X.qzeros` int32
# [groups, out / 8]; `X.scales` [groups, out]; `X.g_idx` int32 [in], the group of each column.
#
# Version 1 checkpoints store zero points minus one. Their writers subtract it from whole words, borrowing from the
# next zero point where one is 0; so it is added to whole words. Sources: AutoGPTQ, `nn_modules/qlinear`;
# GPTQModel, `convert_gptq_v1_to_v2_format_module`.

ONE_IN_EACH_CODE = {4: 0x11111111, 8: 0x01010101}  # one in each code of a word


def take_gptq(weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedTensor:
    rows, columns = shape
    scheme = find_gptq_scheme(weights, name, columns, quantization)
    codes_in_word, groups = codes_per_word(scheme.bits), scheme.group_count(columns)
    check_multiple(weights, f"{name}.qweight", rows, codes_in_word, "rows")
    check_multiple(weights, f"{name}.qweight", columns, codes_in_word, "columns")
    qweight = weights.take(f"{name}.qweight", (columns // codes_in_word, rows), WORD_DTYPES)
    scales = take_scales(weights, f"{name}.scales", (groups, rows))
    qzeros = (
        weights.take(f"{name}.qzeros", (groups, rows // codes_in_word), WORD_DTYPES)
        + quantization.zero_offset * ONE_IN_EACH_CODE[scheme.bits]
    )
    order = None
    if weights.has(f"{name}.g_idx"):
        order = column_order(
            weights.stored_name(f"{name}.g_idx"), weights.take(f"{name}.g_idx", (columns,), WORD_DTYPES), scheme
        )
    packed = as_bytes(qweight.T)
    zero = unpack_codes(qzeros, scheme.bits, rows).T.contiguous()
    return assemble(weights, name, shape, scheme, packed, scales.T.contiguous(), zero, order)


def find_gptq_scheme(weights: Weights, name: str, columns: int, quantization: Quantization) -> Scheme:
    """Return the scheme that matches the shapes; a single scheme is checked when the tensors are taken."""
    if len(quantization.schemes) == 1:
        return quantization.schemes[0]
    qweight, scales = weights.stored_header(f"{name}.qweight"), weights.stored_header(f"{name}.scales")
    for scheme in quantization.schemes:
        if qweight and scales and qweight.shape[:1] == (columns // codes_per_word(scheme.bits),):
            match = quantization.find_scheme(columns, (*scales.shape, 0)[0], bits=scheme.bits)
            if match:
                return match
    raise damaged(
        f"the shapes of {weights.stored_name(f'{name}.qweight')!r} and its scales match no scheme in config.json"
    )


# compressed-tensors, `pack-quantized`: `X.weight_packed` int32 [out, ceil(in / 8)] (in / 4 for 8 bits), codes
# plus 8 or 128; `X.weight_shape` [2]; `X.weight_scale` [out, groups]; `X.weight_zero_point` int32 [ceil(out / 8),
# groups], packed likewise along the rows, or int8 [out, groups], not packed, if groups are blocks of one row;
# `X.weight_g_idx` int32 [in], the group of each column.
#
# Source: compressed-tensors, `compressors/pack_quantized`.


def take_packed(
    weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization
) -> QuantizedTensor:
    rows, columns = shape
    scheme = find_packed_scheme(weights, name, columns, quantization)
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
        zero = take_packed_zeros(weights, f"{name}.weight_zero_point", (rows, groups), scheme.bits)
    size = -(-columns // 2) if scheme.bits == 4 else columns
    packed = as_bytes(words)[:, :size]
    return assemble(weights, name, shape, scheme, packed, scale, zero, order)


def take_packed_zeros(weights: Weights, name: str, shape: tuple[int, int], bits: int) -> Tensor:
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


def find_packed_scheme(weights: Weights, name: str, columns: int, quantization: Quantization) -> Scheme:
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


# One byte per element: `X.weight` int8 or float8_e4m3fn [out, in], in compressed-tensors (`int-quantized`,
# `float-quantized`) and `fp8` checkpoints.
#
# Scales are `X.weight_scale` or, with the same meaning, `X.weight_scale_inv`: one for the tensor, per row, per
# group of a row, or per block of rows and columns. Sources: compressed-tensors, `compressors/naive_quantized`;
# transformers, `integrations/finegrained_fp8.py`.

EIGHT_BIT_SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv")
EIGHT_BIT_FORMATS = {"I8": INT8, "F8_E4M3": FP8}
# Scales of activations that the file would quantize to FP8, but which stay in the model's dtype here.
ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_scale_ub")


def is_eight_bit(weights: Weights, name: str) -> bool:
    """Return whether the matrix has one byte per element and a scale."""
    stored = weights.stored_header(f"{name}.weight")
    return (
        stored is not None
        and stored.dtype in EIGHT_BIT_FORMATS
        and eight_bit_scale_name(weights, name) is not None
    )


def eight_bit_scale_name(weights: Weights, name: str) -> str | None:
    return next((f"{name}.{scale}" for scale in EIGHT_BIT_SCALE_SUFFIXES if weights.has(f"{name}.{scale}")), None)


def take_eight_bit(
    weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization
) -> QuantizedTensor:
    stored, scale_tensor = weights.stored_header(f"{name}.weight"), eight_bit_scale_name(weights, name)
    assert stored and scale_tensor  # is_eight_bit
    floats = stored.dtype == "F8_E4M3"
    q = weights.take(f"{name}.weight", shape, (stored.dtype,))
    schemes = [scheme for scheme in quantization.schemes if scheme.floats == floats and not scheme.words]
    if not schemes:
        raise damaged(
            f"the tensor {stored.name!r} is stored as {stored.dtype}, which config.json does not mention"
        )
    scale, group = take_eight_bit_scale(weights, scale_tensor, shape, schemes)
    for unused in ACTIVATION_SCALES:
        if floats and weights.has(f"{name}.{unused}"):
            weights.take_any(f"{name}.{unused}", ((), (1,)))
    parts = {"q": q, "scale": scale}
    zero = take_eight_bit_zero(weights, name, scale, schemes)
    if zero is not None:
        parts["zero"] = zero
    tensor_format = W8A8 if quantization.activations and not floats else EIGHT_BIT_FORMATS[stored.dtype]
    return QuantizedTensor(tensor_format, shape, parts, group)


def take_eight_bit_scale(
    weights: Weights, name: str, shape: tuple[int, int], schemes: list[Scheme]
) -> tuple[Tensor, int | None]:
    """Return scales per row, [out, groups], expanded from however they are stored, and the columns that share
    one.
    """
    rows, columns = shape
    # Shape of the scales -> rows and columns that share one.
    blocks: dict[tuple[int, int], set[tuple[int, int | None]]] = {}
    for scheme in schemes:
        block_rows, groups = min(scheme.rows, rows), scheme.group_count(columns)
        blocks.setdefault((-(-rows // block_rows), groups), set()).add(
            (block_rows, scheme.group_size if groups > 1 else None)
        )
    dtypes = (*SCALE_DTYPES, "F8_E8M0") if schemes[0].floats else SCALE_DTYPES
    stored = weights.take_any(name, ((rows, 1), (rows,), *blocks, (1, 1), (1,), ()), dtypes)
    scale = stored.float() if stored.dtype == torch.float8_e8m0fnu else stored
    check_finite(weights.stored_name(name), scale.float())
    if scale.shape in ((rows, 1), (rows,)) or scale.numel() == 1:
        return scale.reshape(-1, 1).expand(rows, 1), None
    [(block_rows, block_columns), *others] = blocks[scale.shape[0], scale.shape[1]]
    if others:
        raise damaged(f"the shape of {weights.stored_name(name)!r} matches several of config.json's groups")
    return scale.repeat_interleave(block_rows, 0)[:rows], block_columns


def take_eight_bit_zero(weights: Weights, name: str, scale: Tensor, schemes: list[Scheme]) -> Tensor | None:
    """Return zero points, int8 [out, groups]. Files of symmetric weights may contain zero points of value 0."""
    symmetric, tensor_name = all(scheme.symmetric for scheme in schemes), f"{name}.weight_zero_point"
    if not weights.has(tensor_name) and (symmetric or any(scheme.symmetric for scheme in schemes)):
        return None
    rows, groups = scale.shape
    row_shapes = ((rows,), (1,), ()) if groups == 1 else ()
    zero = weights.take_any(tensor_name, ((rows, groups), *row_shapes), ("I8", "F8_E4M3", *FLOATS))
    if symmetric:
        if (zero.float() != 0).any():
            raise damaged(f"{weights.stored_name(tensor_name)!r} has zero points, but config.json says symmetric")
        return None
    if zero.dtype != torch.int8:
        raise damaged(f"the tensor {weights.stored_name(tensor_name)!r} is not stored as I8")
    return zero.reshape(-1, groups).expand(rows, groups)


# Blocks: gpt-oss's MXFP4, `X.blocks` uint8 [out, in / 32, 16] and `X.scales` uint8 [out, in / 32]; and the formats
# of GGUF files, `X.weight` in blocks, mapped.


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor:
    rows, groups = shape[0], -(-shape[1] // MXFP4_GROUP)
    blocks = weights.take(f"{name}.blocks", (rows, groups, MXFP4_GROUP // 2), dtypes=("U8",))
    scales = weights.take(f"{name}.scales", (rows, groups), dtypes=("U8",))
    check_exponents(weights.stored_name(f"{name}.scales"), scales)
    return QuantizedTensor(MXFP4, shape, {"q": blocks, "scale": scales})


def check_exponents(name: str, exponents: Tensor) -> None:
    """Raise DamagedModel if a scale is NaN. MXFP4 has no infinite scale."""
    if (exponents == MXFP4_NAN_SCALE).any():
        raise damaged(f"the tensor {name!r} has a scale that is NaN")


def take_blocks(weights: Weights, name: str, shape: tuple[int, int], plain: str) -> QuantizedTensor | None:
    """Return the matrix `name` if a GGUF file stores it in another format than `plain` (F32, ...), otherwise None.

    Its scales are not checked: see `check_blocks`.
    """
    stored = weights.stored_header(f"{name}.weight")
    if stored is None or stored.offset is None or stored.dtype == plain:
        return None
    block_format = stored.dtype.lower()
    rows = weights.take(f"{name}.weight", shape, dtypes=(stored.dtype,))
    return QuantizedTensor(block_format, shape, {gguf.BLOCKS_PART: rows.view(torch.uint8)})


def check_blocks(name: str, weight: QuantizedTensor) -> None:
    """Raise DamagedModel if a matrix in blocks has scales that are NaN or infinite. name: of its tensor"""
    rows = weight.parts[gguf.BLOCKS_PART]
    for scales in gguf.row_scales(rows, weight.format):
        check_finite(name, scales)
    if weight.format == "mxfp4_gguf":
        check_exponents(name, gguf.row_exponents(rows))


# The layout of a matrix, by the names of its tensors.

PACKED_READERS = {
    "awq": ("qweight", take_awq),
    "gptq": ("qweight", take_gptq),
    "compressed-tensors": ("weight_packed", take_packed),
}
EIGHT_BIT_METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8")
MATRIX_SUFFIXES = ("weight", "blocks", "qweight", "weight_packed")


def has_matrix(weights: Weights, name: str) -> bool:
    """Return whether there is a matrix of this name, dense or quantized."""
    return any(weights.has(f"{name}.{suffix}") for suffix in MATRIX_SUFFIXES)


def take_quantized(weights: Weights, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
    """Return the matrix `name` if it is stored quantized, otherwise None.

    Raises DamagedModel if its tensors contradict each other or config.json, or contain NaN or infinity.
    """
    if weights.has(f"{name}.blocks"):
        return take_mxfp4(weights, name, shape)
    suffix = next(
        (candidate for candidate in ("qweight", "weight_packed") if weights.has(f"{name}.{candidate}")), None
    )
    if suffix is None and not is_eight_bit(weights, name):
        return None
    quantization = weights.header.quantization_config
    method = quantization.method if quantization else None
    if quantization and suffix and method in PACKED_READERS and PACKED_READERS[method][0] == suffix:
        return PACKED_READERS[method][1](weights, name, shape, quantization)
    if quantization and not suffix and method in EIGHT_BIT_METHODS:
        return take_eight_bit(weights, name, shape, quantization)
    stored = weights.stored_name(f"{name}.{suffix or 'weight'}")
    statement = (
        f"says that weights are stored as {method}" if method else "does not say that weights are quantized"
    )
    raise damaged(f"there is a tensor {stored!r}, but config.json {statement}")
