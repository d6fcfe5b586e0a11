"""What each tensor of a checkpoint takes in memory once it is loaded, and what it would take quantized.

Knows headers alone; `runtime/load.py` and the layers do what is told here, and a test compares the two.
"""

import re
from collections.abc import Callable

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes
from localllm.arch.layout import TABLE
from localllm.checkpoint.header import Header, TensorHeader
from localllm.errors import DamagedModel, UsageError
from localllm.quant.packing import ELEMENT_BYTES, INT8, reads_packed

QUANTS = ("int8", "int4")
GGUF_BITS = {"q8_0": 8.5, "q4_k_m": 4.9}  # a weight of a matrix, on average; published Q4_K_M have 4.8 to 4.95
GROUP = 128  # columns that share a scale in INT4
SCALE_BYTES = 2
EXACT_BYTES = 4  # norms, taps of convolutions, what decides between experts: float32, whatever the dtype
IN_DTYPE = ("bias", "sinks")  # vectors that are not
USED_IN_PIECES = re.compile(r".*\.(kv_b_proj|k_b_proj|v_b_proj)\.(weight|weight_scale)")
TAPS = re.compile(r".*\.(conv1d|conv)\.weight")
# Of the layers' matrices those that a quantizer leaves alone: they are small, and decide much.
KEPT = re.compile(r".*\.(router|shared_gate|in_proj_(b|a|ba)|kv_b_proj|k_b_proj|v_b_proj)\.weight")

Size = Callable[[str, TensorHeader], int]


def stored_dtype(header: Header, device: str, *, gguf: bool = False) -> str:
    """The dtype of most weights, as safetensors spells it. A GGUF file's are not in the one that the model was
    trained in. device: `cpu` or `cuda`; gguf: as if it were such a file."""
    if gguf or header.gguf is not None:
        return "F32" if device == "cpu" else "BF16"
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.elements
    floats = {dtype: size for dtype, size in sizes.items() if dtype.startswith(("F", "BF"))}
    return max(floats, key=lambda dtype: floats[dtype], default="F32")


def weight_bytes(
    header: Header, config: ModelConfig, dtype: str, device: str, quant: str | None = None
) -> WeightBytes:
    """What the weights take in memory on a kind of device; with `quant`, what they would take quantized so.

    quant: of QUANTS, or of GGUF_BITS for about what a published GGUF file of the model takes. Raises UsageError
    for one that is not known, or for weights that are stored quantized.
    """
    if quant is not None and quant not in (*QUANTS, *GGUF_BITS):
        raise UsageError(f"there is no quantization {quant!r}", f"name {' or '.join(QUANTS)}")
    if quant is not None and header.quantization:
        raise UsageError(f"these weights are stored as {header.quantization}", "leave out --quant")

    def size(name: str, tensor: TensorHeader) -> int:
        if quant in GGUF_BITS and len(tensor.shape) == 2:
            return round(tensor.elements * GGUF_BITS[quant] / 8)
        if quant in QUANTS and multiplied(name, tensor, config) and not KEPT.fullmatch(name):
            return quantized_bytes(tensor, quant if name.startswith("layers.") else INT8)
        return loaded_bytes(header, name, tensor, dtype, device)

    return by_use(header, config, size)


def by_use(header: Header, config: ModelConfig, size: Size) -> WeightBytes:
    """The tensors' sizes, added up by how a step reads them."""
    found = {"layers": 0, "experts": 0, "head": 0, "tables": 0}
    for name, tensor in header.tensors.items():
        if not (config.tie_embeddings and name.startswith("lm_head.")):  # stored twice, read once
            found[use_of(name, config.tie_embeddings)] += size(name, tensor)
    return WeightBytes(**found)


def use_of(name: str, tied: bool) -> str:
    """The field of WeightBytes that a tensor counts in."""
    if name.startswith("lm_head.") or (tied and name.startswith("embed_tokens.")):
        return "head"
    if name.startswith(("embed_tokens.", f"{TABLE}.")):
        return "tables"
    return "experts" if ".mlp.experts." in name else "layers"


def loaded_bytes(header: Header, name: str, tensor: TensorHeader, dtype: str, device: str) -> int:
    """As `runtime.load` keeps it: floats in `dtype`, INT8 as well where no kernel reads it packed; matrices of a
    GGUF file, and a table that is looked up by row, as they are stored."""
    element, vector = ELEMENT_BYTES[dtype], len(tensor.shape) < 2
    if name.startswith(f"{TABLE}."):
        return tensor.nbytes
    if name.endswith(".weight_scale") or tensor.dtype == "I8":
        matrix = header.tensors.get(name.removesuffix("_scale"), tensor)
        packed = not USED_IN_PIECES.fullmatch(name) and reads_packed(INT8, matrix.shape[-1], dtype, device)
        if tensor.dtype == "I8":
            return tensor.elements * (1 if packed else element)
        return tensor.elements * element * packed
    if tensor.dtype == "U8":  # parts of MXFP4
        return tensor.elements
    if USED_IN_PIECES.fullmatch(name):
        return tensor.elements * element
    if TAPS.fullmatch(name) or (vector and name.rpartition(".")[2] not in IN_DTYPE):
        return tensor.elements * EXACT_BYTES
    return tensor.nbytes if tensor.offset is not None and not vector else tensor.elements * element


def multiplied(name: str, tensor: TensorHeader, config: ModelConfig) -> bool:
    """Is it a matrix that x is multiplied by: of a layer, or the head?"""
    matrix = name.endswith(".weight") and len(tensor.shape) == 2
    return matrix and (name.startswith("layers.") or use_of(name, config.tie_embeddings) == "head")


def quantized_bytes(tensor: TensorHeader, quant: str) -> int:
    """int8: a byte an element and a scale a row. int4: half a byte, and a scale for each 128 of a row."""
    rows, columns = tensor.shape
    if quant == INT8:
        return rows * (columns + SCALE_BYTES)
    return rows * (-(-columns // 2) + -(-columns // GROUP) * SCALE_BYTES)


def main_matrix(header: Header) -> TensorHeader:
    """The matrix of the layers that stands for all: the largest in the format that most of their bytes are in,
    and of equal ones the one with most rows.

    Raises DamagedModel where the layers have no matrix.
    """
    matrices = [
        tensor
        for name, tensor in header.tensors.items()
        if name.startswith("layers.") and len(tensor.shape) >= 2 and not name.endswith((".scales", "_scale"))
    ]
    sizes: dict[str, int] = {}
    for tensor in matrices:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        raise DamagedModel(f"{header.path} holds no matrix of a layer", "fetch the model again")
    most = max(sizes, key=lambda form: sizes[form])
    return max(
        (tensor for tensor in matrices if tensor.dtype == most),
        key=lambda tensor: (tensor.elements, tensor.shape[0]),
    )
