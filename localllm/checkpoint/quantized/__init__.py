"""Reads a quantized matrix of a checkpoint as a `QuantizedTensor`, with one module per layout.

The names of a matrix's tensors determine its layout; config.json must agree.
"""

from localllm.checkpoint.quantized.awq import take_awq
from localllm.checkpoint.quantized.blocks import check_blocks, take_blocks, take_mxfp4
from localllm.checkpoint.quantized.compressed import take_packed
from localllm.checkpoint.quantized.eight_bits import is_eight_bit, take_eight_bit
from localllm.checkpoint.quantized.gptq import take_gptq
from localllm.checkpoint.tensors import Weights
from localllm.errors import DamagedModel
from localllm.quant.tensor import QuantizedTensor

__all__ = ["check_blocks", "has_matrix", "take_blocks", "take_quantized"]

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
    raise DamagedModel(f"there is a tensor {stored!r}, but config.json {statement}", "fetch the model again")
