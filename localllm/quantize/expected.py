"""Predicts from a header what a recipe makes of a model: bytes on the disk, and whether it is possible.

No torch.
"""

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import DTYPE_BYTES, Header, TensorHeader
from localllm.errors import UnsupportedModel, UsageError
from localllm.plan.weights import UNQUANTIZED_MATRIX, is_multiplied
from localllm.quantize.recipe import Recipe

GROUPS_LARGEST_FIRST = (128, 64, 32)
HEADER_BYTES = 2**16  # per file: names and offsets of tensors


def artefact_bytes(header: Header, recipe: Recipe) -> int:
    """Return the approximate size of the artefact's files."""
    config = parse_config(header.config)
    sizes = 0
    for name, tensor in header.tensors.items():
        if is_quantized(name, tensor, config):
            bits, group = (recipe.bits, recipe.group) if name.startswith("layers.") else (recipe.head_bits, None)
            sizes += (
                quantized_bytes(tensor, bits, group, symmetric=recipe.symmetric) if bits < 16 else tensor.nbytes
            )
        if not is_quantized(name, tensor, config) or name == "embed_tokens.weight":
            sizes += tensor.nbytes
    return sizes + HEADER_BYTES * (len(config.layers) + 2)


def quantized_bytes(tensor: TensorHeader, bits: int, group: int | None, *, symmetric: bool) -> int:
    rows, columns = tensor.shape
    groups = -(-columns // group) if group else 1
    group_bytes = DTYPE_BYTES[tensor.dtype] + (0 if symmetric else 1)
    return rows * (-(-columns * bits // 8) + groups * group_bytes)


def is_quantized(name: str, tensor: TensorHeader, config: ModelConfig) -> bool:
    """Return whether it is a matrix of a layer, or the head, that recipes quantize."""
    return is_multiplied(name, tensor, config) and not UNQUANTIZED_MATRIX.fullmatch(name)


def quantized_layer_matrices(header: Header) -> list[TensorHeader]:
    """Return the matrices of layers that are quantized."""
    config, tensors = parse_config(header.config), header.tensors
    return [t for name, t in tensors.items() if name.startswith("layers.") and is_quantized(name, t, config)]


def check_group_size(header: Header, recipe: Recipe) -> None:
    """Raise UsageError if the group does not divide the columns of every matrix, and UnsupportedModel if there is
    no matrix to quantize.
    """
    matrices = quantized_layer_matrices(header)
    if not matrices:
        raise UnsupportedModel(f"{header.path} has no matrices to quantize in its layers", None)
    uneven = [tensor for tensor in matrices if recipe.group and tensor.shape[1] % recipe.group]
    if not uneven:
        return
    group = largest_dividing_group(header)
    alternative = f"--group {group} does" if group else "--bits 8 --group 0 gives each row one scale"
    raise UsageError(
        f"groups of {recipe.group} do not divide the {uneven[0].shape[1]} columns of {uneven[0].name}", alternative
    )


def largest_dividing_group(header: Header) -> int | None:
    """Return the largest group that divides the columns of every layer matrix; None if there is none."""
    widths = {tensor.shape[1] for tensor in quantized_layer_matrices(header)}
    return next((group for group in GROUPS_LARGEST_FIRST if not any(width % group for width in widths)), None)
