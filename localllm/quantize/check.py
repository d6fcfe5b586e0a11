"""Checks a recipe, and that there is enough memory for it, before any weight is read."""

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import DTYPE_BYTES, Header, TensorHeader
from localllm.errors import DoesNotFit, UnsupportedModel, UsageError
from localllm.formatting import format_bytes
from localllm.hardware.device import free_host_bytes
from localllm.plan.weights import is_quantized
from localllm.quantize.inputs import MAX_SAMPLES
from localllm.quantize.source import METHODS, Recipe

GROUPS_LARGEST_FIRST = (128, 64, 32)
HEADER_BYTES = 2**16  # per file: names and offsets of tensors
GROUP_SIZES = (32, 64, 128)  # columns
FLOAT32_BYTES = 4
TRANSIENT = 2**28  # the program itself, tiles, one window's attention


def check_recipe(recipe: Recipe) -> None:
    """Raise UsageError for a recipe that contradicts itself."""
    if recipe.method not in METHODS:
        raise UsageError(f"there is no method {recipe.method!r}", f"use one of {', '.join(METHODS)}")
    if recipe.bits not in (4, 8):
        raise UsageError(f"{recipe.bits} bits are not supported", "4 and 8 are")
    if recipe.head_bits not in (8, 16):
        raise UsageError(f"a head of {recipe.head_bits} bits is not supported", "8 and 16 are")
    if recipe.group is not None and recipe.group not in GROUP_SIZES:
        raise UsageError(
            f"groups of {recipe.group} are not supported", f"{', '.join(map(str, GROUP_SIZES))} and whole rows are"
        )
    if recipe.activations and (recipe.bits, recipe.group, recipe.symmetric) != (8, None, True):
        raise UsageError(
            "activations can be quantized only with symmetric INT8 weights that have a scale per row",
            "leave out --group, and use --bits 8",
        )
    if recipe.method == "smoothquant" and not recipe.activations:
        raise UsageError("smoothquant requires quantized activations", "use --activations int8, or awq")
    if recipe.method == "awq" and recipe.activations:
        raise UsageError("awq quantizes weights only", "use smoothquant to quantize activations")


def required_memory_bytes(header: Header, config: ModelConfig, recipe: Recipe, tokens: int) -> int:
    """Return the peak memory in bytes, for `tokens` calibration tokens in total.

    Round to nearest: one layer as stored and quantized, and a tile. Others: one layer twice in float32 (its
    tensors, and stacks of those that share inputs); the hidden states; MAX_SAMPLES rows of each product's inputs;
    for GPTQ, X^T X of as many products as have the bytes of the layer, or of one, and four more of the largest to
    invert it; for AWQ, X^T X within each group of the largest.
    """
    layers: dict[str, int] = {}
    widest = 0
    for name, tensor in header.tensors.items():
        if name.startswith("layers."):
            layer = name.split(".", 2)[1]
            layers[layer] = layers.get(layer, 0) + tensor.elements
            widest = max(widest, tensor.shape[-1] if len(tensor.shape) == 2 else 0)
    largest = max(layers.values(), default=0) * FLOAT32_BYTES
    if recipe.method == "rtn":
        return largest * 2 + TRANSIENT
    products = 4 * max_experts(config)
    needed = (
        2 * largest + tokens * config.hidden_size * FLOAT32_BYTES + products * MAX_SAMPLES * widest * FLOAT32_BYTES
    )
    if recipe.method == "gptq":
        hessian_bytes = widest**2 * FLOAT32_BYTES
        needed += max(largest, hessian_bytes) + 4 * hessian_bytes
    if recipe.method == "awq":
        needed += widest * min(widest, recipe.group or widest) * FLOAT32_BYTES
    return needed + TRANSIENT


def max_experts(config: ModelConfig) -> int:
    return max((getattr(layer.ffn, "experts", 0) + 1 for layer in config.layers), default=1)


def check_memory(header: Header, config: ModelConfig, recipe: Recipe, tokens: int) -> None:
    """Raise DoesNotFit if there is too little free memory."""
    needed, free = required_memory_bytes(header, config, recipe, tokens), free_host_bytes()
    if needed > free:
        raise DoesNotFit(
            f"quantizing with {recipe.method} takes {format_bytes(needed)}, but {format_bytes(free)} are free",
            "free memory, or use --method rtn" if recipe.method != "rtn" else "free memory",
        )


def artefact_bytes(header: Header, recipe: Recipe) -> int:
    """Predict the size of the artefact's files from the model's header."""
    config = parse_config(header.config)
    sizes = 0
    for name, tensor in header.tensors.items():
        if is_quantized(name, tensor, config):
            bits = recipe.bits if name.startswith("layers.") else recipe.head_bits
            group, symmetric = (recipe.group, recipe.symmetric) if bits == recipe.bits else (None, True)
            sizes += quantized_bytes(tensor, bits, group, symmetric=symmetric) if bits < 16 else tensor.nbytes
        if not is_quantized(name, tensor, config) or name == "embed_tokens.weight":
            sizes += tensor.nbytes
    return sizes + HEADER_BYTES * (len(config.layers) + 2)


def quantized_bytes(tensor: TensorHeader, bits: int, group: int | None, *, symmetric: bool) -> int:
    rows, columns = tensor.shape
    groups = -(-columns // group) if group else 1
    group_bytes = DTYPE_BYTES[tensor.dtype] + (0 if symmetric else 1)
    return rows * (-(-columns * bits // 8) + groups * group_bytes)


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
