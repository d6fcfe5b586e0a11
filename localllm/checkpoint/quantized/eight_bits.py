"""One byte per element: `X.weight` int8 or float8_e4m3fn [out, in], in compressed-tensors (`int-quantized`,
`float-quantized`) and `fp8` checkpoints.

Scales are `X.weight_scale` or, with the same meaning, `X.weight_scale_inv`: one for the tensor, per row, per group
of a row, or per block of rows and columns. Sources: compressed-tensors, `compressors/naive_quantized`;
transformers, `integrations/finegrained_fp8.py`.
"""

import torch
from torch import Tensor

from localllm.checkpoint.layouts import Quantization, Scheme
from localllm.checkpoint.quantized import words
from localllm.checkpoint.quantized.words import damaged
from localllm.checkpoint.tensors import FLOATS, Weights, check_finite
from localllm.quant.packing import FP8, INT8, W8A8
from localllm.quant.tensor import QuantizedTensor

SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv")
FORMATS = {"I8": INT8, "F8_E4M3": FP8}
# Scales of activations that the file would quantize to FP8, but which stay in the model's dtype here.
ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_scale_ub")


def is_eight_bit(weights: Weights, name: str) -> bool:
    """Return whether the matrix has one byte per element and a scale."""
    stored = weights.stored_header(f"{name}.weight")
    return stored is not None and stored.dtype in FORMATS and scale_name(weights, name) is not None


def scale_name(weights: Weights, name: str) -> str | None:
    return next((f"{name}.{scale}" for scale in SCALE_SUFFIXES if weights.has(f"{name}.{scale}")), None)


def take_eight_bit(
    weights: Weights, name: str, shape: tuple[int, int], quantization: Quantization
) -> QuantizedTensor:
    stored, scale_tensor = weights.stored_header(f"{name}.weight"), scale_name(weights, name)
    assert stored and scale_tensor  # is_eight_bit
    floats = stored.dtype == "F8_E4M3"
    q = weights.take(f"{name}.weight", shape, (stored.dtype,))
    schemes = [scheme for scheme in quantization.schemes if scheme.floats == floats and not scheme.words]
    if not schemes:
        raise damaged(
            f"the tensor {stored.name!r} is stored as {stored.dtype}, which config.json does not mention"
        )
    scale, group = take_scale(weights, scale_tensor, shape, schemes)
    for unused in ACTIVATION_SCALES:
        if floats and weights.has(f"{name}.{unused}"):
            weights.take_any(f"{name}.{unused}", ((), (1,)))
    parts = {"q": q, "scale": scale}
    zero = take_zero(weights, name, scale, schemes)
    if zero is not None:
        parts["zero"] = zero
    tensor_format = W8A8 if quantization.activations and not floats else FORMATS[stored.dtype]
    return QuantizedTensor(tensor_format, shape, parts, group)


def take_scale(
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
    dtypes = (*words.SCALE_DTYPES, "F8_E8M0") if schemes[0].floats else words.SCALE_DTYPES
    stored = weights.take_any(name, ((rows, 1), (rows,), *blocks, (1, 1), (1,), ()), dtypes)
    scale = stored.float() if stored.dtype == torch.float8_e8m0fnu else stored
    check_finite(weights.stored_name(name), scale.float())
    if scale.shape in ((rows, 1), (rows,)) or scale.numel() == 1:
        return scale.reshape(-1, 1).expand(rows, 1), None
    [(block_rows, block_columns), *others] = blocks[scale.shape[0], scale.shape[1]]
    if others:
        raise damaged(f"the shape of {weights.stored_name(name)!r} matches several of config.json's groups")
    return scale.repeat_interleave(block_rows, 0)[:rows], block_columns


def take_zero(weights: Weights, name: str, scale: Tensor, schemes: list[Scheme]) -> Tensor | None:
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
