"""What each tensor of a checkpoint takes in memory once it is loaded, and what it would take quantized.

Knows headers alone; `runtime/weight_source.py` and the layers do what is told here, and a test compares the two.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes
from localllm.arch.layout import PER_LAYER_TABLE
from localllm.checkpoint.header import DTYPE_BYTES, Header, TensorHeader
from localllm.checkpoint.matrices import (
    CODE_SUFFIXES,
    ORDER_SUFFIXES,
    SCALE_SUFFIXES,
    PackedMatrix,
    find_packed_matrix,
)
from localllm.errors import DamagedModel, UsageError
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.packing import (
    ELEMENT_BYTES,
    GGUF_INTERLEAVED_BYTES,
    GPU_PACKED_BITS,
    INT4,
    INT8,
    K_QUANT_BLOCK,
    MXFP4,
    TILE_ROWS,
    gguf_gpu_packed_bytes,
    gpu_packed_size,
    interleaved_columns,
    interleaved_group,
    stays_packed,
)

QUANTS = ("int8", "int4")
# Bits a weight of a matrix, by its use. Q4_K_M keeps some matrices of the layers in Q6_K, and the head (llama.cpp,
# src/llama-quant.cpp); 4.8 is what published Llamas and Qwens have on average.
GGUF_BITS = {
    "q8_0": {"layers": 8.5, "experts": 8.5, "head": 8.5, "tables": 8.5},
    "q4_k_m": {"layers": 4.8, "experts": 4.8, "head": 6.5625, "tables": 4.5},
}
# Where rows are no whole blocks of 256 it takes Q5_0 for Q4_K, and Q8_0 for Q6_K.
UNEVEN_BITS = {"layers": 5.5, "experts": 5.5, "head": 8.5, "tables": 5.5}
INT4_GROUP_SIZE = 128  # columns that share a scale in INT4
MXFP4_GROUP_SIZE = 32
GGUF_PLAIN = ("f32", "f16", "bf16")  # of a GPU in the model's dtype
GGUF_DTYPE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
FLOAT32_BYTES = 4  # norms, taps of convolutions, what decides between experts: float32, whatever the dtype
MODEL_DTYPE_VECTORS = ("bias", "sinks")  # vectors that are not
SPLIT_MATRIX = re.compile(r".*\.(kv_b_proj|k_b_proj|v_b_proj)\.\w+")
CONVOLUTION_TAPS = re.compile(r".*\.(conv1d|conv)\.weight")
# Of the layers' matrices those that a quantizer leaves alone: they are small, and decide much.
UNQUANTIZED_MATRIX = re.compile(r".*\.(router|shared_gate|in_proj_(b|a|ba)|kv_b_proj|k_b_proj|v_b_proj)\.weight")

# What a matrix is stored in that is quantized otherwise than in blocks.
PACKED_SUFFIXES = (
    *(*CODE_SUFFIXES, *SCALE_SUFFIXES, *ORDER_SUFFIXES, "qzeros", "weight_zero_point", "weight_shape"),
    *("input_scale", "activation_scale", "input_scale_ub"),
)
ORDER_BYTES = 8  # of a column

SHARED_ORDER = (".k_proj", ".v_proj", ".up_proj")  # below others that read the same columns, in the same order
NOT_MATRICES = (".scales", "_scale", "_scale_inv", ".qzeros", "_zero_point")  # two-dimensional, too

TensorSize = Callable[[str, TensorHeader], int]


def stored_dtype(header: Header, device: str, *, gguf: bool = False) -> str:
    """The dtype of most weights, as safetensors spells it; BF16 where most are blocks of GGUF, and on GPUs for the
    rest of such files, too. device: `cpu` or `cuda`; gguf: as if it were a file of blocks."""
    if gguf:
        return "BF16"
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.elements
    if header.gguf is not None:
        most = max(sizes, key=lambda dtype: sizes[dtype], default="F32")
        return "F32" if most in ("F32", "F16") and device == "cpu" else "BF16"
    floats = {dtype: size for dtype, size in sizes.items() if dtype in ("F64", "F32", "F16", "BF16")}
    return max(floats, key=lambda dtype: floats[dtype], default="F32")


def check_quant(quant: str | None) -> None:
    """Raises UsageError for one that is not known."""
    if quant is not None and quant not in (*QUANTS, *GGUF_BITS):
        raise UsageError(f"there is no quantization {quant!r}", f"name one of {', '.join((*QUANTS, *GGUF_BITS))}")


def weight_bytes(
    header: Header, config: ModelConfig, dtype: str, device: str, quant: str | None = None
) -> WeightBytes:
    """What the weights take in memory on a kind of device; with `quant`, what they would take quantized so.

    quant: of QUANTS, which is what `--quant` makes of them, or of GGUF_BITS for about what a published GGUF file
    of the model takes. Raises UsageError for one that is not known, or for weights that are stored quantized.
    """
    check_quant(quant)
    if quant is not None and header.quantization:
        raise UsageError(f"these weights are stored as {header.quantization}", "leave out --quant")

    scale = DTYPE_BYTES[stored_dtype(header, device)] if quant in QUANTS else 0

    def size(name: str, tensor: TensorHeader) -> int:
        if quant in GGUF_BITS and len(tensor.shape) == 2:
            return gguf_bytes(tensor, quant, use_of(name, config.tie_embeddings))
        if quant in QUANTS and is_multiplied(name, tensor, config) and not UNQUANTIZED_MATRIX.fullmatch(name):
            return quantized_bytes(tensor, quant if name.startswith("layers.") else INT8, scale, device)
        if is_multiplied(name, tensor, config) and not SPLIT_MATRIX.fullmatch(name):
            return gguf_packed_bytes(tensor, dtype, device) or loaded_bytes(header, name, tensor, dtype, device)
        return loaded_bytes(header, name, tensor, dtype, device)

    found = sum_by_use(header, config, size)
    embedding = "embed_tokens.weight"
    if not config.tie_embeddings or embedding not in header.tensors:
        return found
    # The head is apart from the embedding once it is quantized, or in lanes or planes.
    stored = header.tensors[embedding]
    apart = quant in QUANTS or (quant is None and gguf_packed_bytes(stored, dtype, device))
    return replace(
        found, tables=found.tables + loaded_bytes(header, embedding, stored, dtype, device) * bool(apart)
    )


def sum_by_use(header: Header, config: ModelConfig, size: TensorSize) -> WeightBytes:
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
    if name.startswith(("embed_tokens.", f"{PER_LAYER_TABLE}.")):
        return "tables"
    return "experts" if ".mlp.experts." in name else "layers"


def loaded_bytes(header: Header, name: str, tensor: TensorHeader, dtype: str, device: str) -> int:
    """As `runtime.load` keeps it: floats in `dtype`, FP8 as well where no kernel reads it packed; matrices of a
    GGUF file that nothing lays out otherwise, and a table that is looked up by row, as they are stored."""
    element, vector = ELEMENT_BYTES[dtype], len(tensor.shape) < 2
    if name.startswith(f"{PER_LAYER_TABLE}."):
        return tensor.nbytes
    module, _, kind = name.rpartition(".")
    if kind in PACKED_SUFFIXES and (matrix := find_packed_matrix(header, module)):
        if kind in ORDER_SUFFIXES and module.endswith(SHARED_ORDER):
            return 0
        pieces = SPLIT_MATRIX.fullmatch(name)
        if not pieces and stays_packed(matrix.format, device):
            return part_bytes(matrix, kind, device)
        return matrix.rows * matrix.columns * element if kind in CODE_SUFFIXES else 0
    if tensor.dtype == "U8":  # parts of MXFP4
        return tensor.elements if device == "cpu" else mxfp4_planes_bytes(tensor)
    if SPLIT_MATRIX.fullmatch(name):
        return tensor.elements * element
    if CONVOLUTION_TAPS.fullmatch(name) or (vector and name.rpartition(".")[2] not in MODEL_DTYPE_VECTORS):
        return tensor.elements * FLOAT32_BYTES
    return tensor.nbytes if tensor.offset is not None and not vector else tensor.elements * element


def gguf_packed_bytes(tensor: TensorHeader, dtype: str, device: str) -> int | None:
    """Of a matrix of a GGUF file in lanes or planes; None where its format stays as it is."""
    form = tensor.dtype.lower()
    if tensor.offset is None:
        return None
    rows, columns = tensor.shape
    if device != "cpu":
        plain = (
            rows * columns * ELEMENT_BYTES[dtype]
            if form in GGUF_PLAIN and form != GGUF_DTYPE_NAMES[dtype]
            else None
        )
        return gguf_gpu_packed_bytes(form, rows, columns) or plain
    if form not in GGUF_INTERLEAVED_BYTES:
        return None
    return (
        -(-rows // TILE_ROWS)
        * TILE_ROWS
        * columns
        // BLOCK_TYPE_BY_NAME[form].block_elements
        * GGUF_INTERLEAVED_BYTES[form]
    )


def mxfp4_planes_bytes(tensor: TensorHeader) -> int:
    """Of the codes [rows, groups, 16] or the scales [rows, groups] of a matrix."""
    rows, groups, *codes = tensor.shape
    found = gpu_packed_size(rows, groups * MXFP4_GROUP_SIZE, MXFP4_GROUP_SIZE, GPU_PACKED_BITS[MXFP4])
    assert found
    return found[0] if codes else found[1]


def part_bytes(matrix: PackedMatrix, kind: str, device: str) -> int:
    """Of one tensor of a quantized matrix, once it is a part of a QuantizedTensor: in lanes or in planes."""
    codes, numbers = matrix.code_bytes, matrix.rows * matrix.group_count
    bits = {INT4: 4, INT8: 8}.get(matrix.format)
    if device != "cpu" and matrix.format in GPU_PACKED_BITS:
        laid = gpu_packed_size(matrix.rows, matrix.columns, matrix.group_size, GPU_PACKED_BITS[matrix.format])
        codes, numbers = laid or (codes, numbers)
    elif device == "cpu" and bits and (group := interleaved_group(matrix.group_size, matrix.columns, bits)):
        rows, columns = -(-matrix.rows // TILE_ROWS) * TILE_ROWS, interleaved_columns(group, matrix.columns)
        codes, numbers = rows * columns * bits // 8, rows * columns // group
    if kind in CODE_SUFFIXES:
        return codes
    if kind in SCALE_SUFFIXES:
        return numbers * DTYPE_BYTES[matrix.scale_dtype]
    if kind in ("qzeros", "weight_zero_point"):
        return numbers * matrix.has_zeros
    return matrix.columns * ORDER_BYTES * matrix.act_order if kind in ORDER_SUFFIXES else 0


def is_multiplied(name: str, tensor: TensorHeader, config: ModelConfig) -> bool:
    """Is it a matrix that x is multiplied by: of a layer, or the head?"""
    matrix = name.endswith(".weight") and len(tensor.shape) == 2
    return matrix and (name.startswith("layers.") or use_of(name, config.tie_embeddings) == "head")


def quantized_bytes(tensor: TensorHeader, quant: str, scale: int, device: str) -> int:
    """int8: a byte an element and a scale a row. int4: half a byte, and a scale for each 128 of a row. scale: its
    bytes."""
    rows, columns = tensor.shape
    kind = "F32" if scale == FLOAT32_BYTES else "F16"
    if quant == INT8:
        matrix = PackedMatrix(INT8, rows, columns, group_count=1, group_size=None, scale_dtype=kind)
    else:
        matrix = PackedMatrix(
            INT4,
            rows,
            columns,
            group_count=-(-columns // INT4_GROUP_SIZE),
            group_size=INT4_GROUP_SIZE,
            scale_dtype=kind,
        )
    return part_bytes(matrix, "weight", device) + part_bytes(matrix, "weight_scale", device)


def gguf_bytes(tensor: TensorHeader, quant: str, use: str) -> int:
    """About what a published GGUF file has. use: as `use_of` tells it."""
    uneven = quant == "q4_k_m" and tensor.shape[1] % K_QUANT_BLOCK
    bits = UNEVEN_BITS if uneven else GGUF_BITS[quant]
    return round(tensor.elements * bits[use] / 8)


def representative_matrix(header: Header) -> TensorHeader | PackedMatrix:
    """The matrix of the layers that stands for all: the largest in the format that most of their bytes are in,
    and of equal ones the one with most rows.

    Raises DamagedModel where the layers have no matrix.
    """
    matrices = {
        name: tensor
        for name, tensor in header.tensors.items()
        if name.startswith("layers.") and len(tensor.shape) >= 2 and not name.endswith(NOT_MATRICES)
    }
    sizes: dict[str, int] = {}
    for tensor in matrices.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        raise DamagedModel(f"{header.path} holds no matrix of a layer", "fetch the model again")
    most = max(sizes, key=lambda form: sizes[form])
    name, found = max(
        ((name, tensor) for name, tensor in matrices.items() if tensor.dtype == most),
        key=lambda named: (named[1].elements, named[1].shape[0]),
    )
    return find_packed_matrix(header, name.rpartition(".")[0]) or found
