"""GPTQ's layout: `X.qweight` int32 [in / 8, out] (in / 4 of 8 bits), a word a run of columns; `X.qzeros` int32
[groups, out / 8]; `X.scales` [groups, out]; `X.g_idx` int32 [in], the group of each column.

Checkpoints of version 1 store zero points less one. Their writers subtract it from whole words, borrowing from the
next zero point where one is 0; so it is added to whole words. Sources: AutoGPTQ, `nn_modules/qlinear`; GPTQModel,
`convert_gptq_v1_to_v2_format_module`.
"""

from localllm.checkpoint.layouts import Quantization, Scheme
from localllm.checkpoint.quantized.words import (
    WORDS,
    assembled,
    bytes_of,
    check_whole,
    codes_of,
    damaged,
    order_of,
    per_word,
    take_scales,
)
from localllm.checkpoint.safetensors import Weights
from localllm.quant.tensor import QuantizedTensor

ONES = {4: 0x11111111, 8: 0x01010101}  # one in each code of a word


def take_gptq(weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedTensor:
    rows, columns = shape
    scheme = scheme_of(weights, name, columns, quantization)
    run, groups = per_word(scheme.bits), scheme.groups(columns)
    check_whole(weights, f"{name}.qweight", rows, run, "rows")
    check_whole(weights, f"{name}.qweight", columns, run, "columns")
    qweight = weights.take(f"{name}.qweight", (columns // run, rows), WORDS)
    scales = take_scales(weights, f"{name}.scales", (groups, rows))
    qzeros = weights.take(f"{name}.qzeros", (groups, rows // run), WORDS) + quantization.less * ONES[scheme.bits]
    order = None
    if weights.has(f"{name}.g_idx"):
        order = order_of(
            weights.spelled(f"{name}.g_idx"), weights.take(f"{name}.g_idx", (columns,), WORDS), scheme
        )
    packed = bytes_of(qweight.T)
    zero = codes_of(qzeros, scheme.bits, rows).T.contiguous()
    return assembled(weights, name, shape, scheme, packed, scales.T.contiguous(), zero, order)


def scheme_of(weights: Weights, name: str, columns: int, quantization: Quantization) -> Scheme:
    """Of several, the one that the shapes speak of; a single one is held against them when they are taken."""
    if len(quantization.schemes) == 1:
        return quantization.schemes[0]
    qweight, scales = weights.stored(f"{name}.qweight"), weights.stored(f"{name}.scales")
    for scheme in quantization.schemes:
        if qweight and scales and qweight.shape[:1] == (columns // per_word(scheme.bits),):
            found = quantization.fitting(columns, (*scales.shape, 0)[0], bits=scheme.bits)
            if found:
                return found
    raise damaged(f"the shapes of {weights.spelled(f'{name}.qweight')!r} and its scales are none of config.json's")
