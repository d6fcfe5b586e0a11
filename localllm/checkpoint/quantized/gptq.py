"""GPTQ's layout: `X.qweight` int32 [in / 8, out] (in / 4 for 8 bits), a word per run of columns; `X.qzeros` int32
[groups, out / 8]; `X.scales` [groups, out]; `X.g_idx` int32 [in], the group of each column.

Version 1 checkpoints store zero points minus one. Their writers subtract it from whole words, borrowing from the
next zero point where one is 0; so it is added to whole words. Sources: AutoGPTQ, `nn_modules/qlinear`; GPTQModel,
`convert_gptq_v1_to_v2_format_module`.
"""

from localllm.checkpoint.layouts import Quantization, Scheme
from localllm.checkpoint.quantized.words import (
    WORD_DTYPES,
    as_bytes,
    assemble,
    check_multiple,
    codes_per_word,
    column_order,
    damaged,
    take_scales,
    unpack_codes,
)
from localllm.checkpoint.tensors import Weights
from localllm.quant.tensor import QuantizedTensor

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
