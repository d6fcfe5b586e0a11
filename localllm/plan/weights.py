"""The memory that each tensor of a checkpoint takes once it is loaded, and what it would take quantized.

Uses headers only; `runtime/weight_source.py` and the layers load weights accordingly, and a test compares the two.
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
from localllm.errors import DamagedModel, UnsupportedModel, UsageError
from localllm.hardware.processor import matrix_dtype_for
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
# Bits per weight of a matrix, by its use. Q4_K_M stores some matrices of the layers, and the head, in Q6_K
# (llama.cpp,
# src/llama-quant.cpp); 4.8 is the average of published Llama and Qwen models.
GGUF_BITS = {
    "q8_0": {"layers": 8.5, "experts": 8.5, "head": 8.5, "tables": 8.5},
    "q4_k_m": {"layers": 4.8, "experts": 4.8, "head": 6.5625, "tables": 4.5},
}
# Rows that are not multiples of 256 are stored in Q5_0 instead of Q4_K, and in Q8_0 instead of Q6_K.
UNEVEN_BITS = {"layers": 5.5, "experts": 5.5, "head": 8.5, "tables": 5.5}
INT4_GROUP_SIZE = 128  # columns that share a scale in INT4
MXFP4_GROUP_SIZE = 32
GGUF_PLAIN = ("f32", "f16", "bf16")  # converted to the model's dtype on a GPU
GGUF_DTYPE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
FLOAT32_BYTES = 4  # norms, convolution taps and router biases are float32 in every dtype
MODEL_DTYPE_VECTORS = ("bias", "sinks")  # vectors in the model's dtype
ENCODER_TABLES = ("embed_positions.", "embed_kinds.")  # added to embeddings in the model's dtype
SPLIT_MATRIX = re.compile(r".*\.(kv_b_proj|k_b_proj|v_b_proj)\.\w+")
CONVOLUTION_TAPS = re.compile(r".*\.(conv1d|conv)\.weight")
# Layer matrices that quantizers leave unquantized: they are small and influential.
UNQUANTIZED_MATRIX = re.compile(r".*\.(router|shared_gate|in_proj_(b|a|ba)|kv_b_proj|k_b_proj|v_b_proj)\.weight")

# Suffixes of the tensors of a matrix that is quantized in a format other than blocks.
PACKED_SUFFIXES = (
    *(*CODE_SUFFIXES, *SCALE_SUFFIXES, *ORDER_SUFFIXES, "qzeros", "weight_zero_point", "weight_shape"),
    *("input_scale", "activation_scale", "input_scale_ub"),
)
ORDER_BYTES = 8  # per column

# Suffixes of matrices stacked below others with the same columns, whose order they share.
SHARED_ORDER = (".k_proj", ".v_proj", ".up_proj")
NOT_MATRICES = (".scales", "_scale", "_scale_inv", ".qzeros", "_zero_point")  # other two-dimensional tensors

TensorSize = Callable[[str, TensorHeader], int]


def stored_dtype(header: Header, device: str, *, gguf: bool = False) -> str:
    """Return the dtype of most weights, by safetensors' name.

    For GGUF files it is BF16 if most are blocks, and on GPUs. device: `cpu` or `cuda`; gguf: as for a GGUF file in
    blocks
    """
    if gguf:
        return "BF16"
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.elements
    if header.gguf is not None:
        most_frequent = max(sizes, key=lambda dtype: sizes[dtype], default="F32")
        return "F32" if most_frequent in ("F32", "F16") and device == "cpu" else "BF16"
    floats = {dtype: size for dtype, size in sizes.items() if dtype in ("F64", "F32", "F16", "BF16")}
    return max(floats, key=lambda dtype: floats[dtype], default="F32")


def check_quant(quant: str | None) -> None:
    """Raise UsageError for an unknown quantization."""
    if quant is not None and quant not in (*QUANTS, *GGUF_BITS):
        raise UsageError(f"there is no quantization {quant!r}", f"use one of {', '.join((*QUANTS, *GGUF_BITS))}")


def weight_bytes(
    header: Header, config: ModelConfig, dtype: str, device: str, quant: str | None = None
) -> WeightBytes:
    """Return the memory of the weights on a type of device; with `quant`, what they would take quantized.

    quant: of QUANTS, for the result of `--quant`, or of GGUF_BITS, for the approximate size of a published GGUF
    file. Raises UsageError for an unknown one, or for weights that are stored quantized, and like
    `check_int4_groups`.
    """
    check_quant(quant)
    if quant is not None and header.quantization:
        raise UsageError(f"these weights are already quantized ({header.quantization})", "leave out --quant")

    scale = DTYPE_BYTES[stored_dtype(header, device)] if quant in QUANTS else 0
    if quant == INT4:
        check_int4_groups(header, config)

    def size(name: str, tensor: TensorHeader) -> int:
        if quant in GGUF_BITS and len(tensor.shape) == 2:
            return gguf_bytes(tensor, quant, use_of(name, config.tie_embeddings))
        if quant in QUANTS and is_quantized(name, tensor, config):
            return quantized_bytes(tensor, quant if name.startswith("layers.") else INT8, scale, device)
        if is_multiplied(name, tensor, config) and not SPLIT_MATRIX.fullmatch(name):
            return gguf_packed_bytes(tensor, dtype, device) or loaded_bytes(header, name, tensor, dtype, device)
        return loaded_bytes(header, name, tensor, dtype, device)

    sizes = sum_by_use(header, config, size)
    embedding = "embed_tokens.weight"
    if not config.tie_embeddings or embedding not in header.tensors:
        return sizes
    # A head that is quantized, or packed for a GPU, is separate from the embedding.
    stored = header.tensors[embedding]
    packed_for_gpu = device != "cpu" and quant is None and gguf_packed_bytes(stored, dtype, device)
    head_is_separate = quant in QUANTS or packed_for_gpu
    return replace(
        sizes,
        tables=sizes.tables + loaded_bytes(header, embedding, stored, dtype, device) * bool(head_is_separate),
    )


def check_int4_groups(header: Header, config: ModelConfig) -> None:
    """Raise UnsupportedModel if a rank's part of a matrix has no whole groups, and cannot be divided by rows (see
    `shard_model`): it could not be loaded once it is quantized."""
    for name, tensor in header.tensors.items():
        part = tensor.part if name.startswith("layers.") and is_quantized(name, tensor, config) else None
        if part is None or part.dim == 0:
            continue
        by_rows = not config.mixtures and len(part.segments) == 1
        if not by_rows and any(border % INT4_GROUP_SIZE for segment in part.segments for border in segment):
            whole = ", divide the experts with --expert-parallel" if ".experts." in name else ""
            raise UnsupportedModel(
                f"the {part.whole[1]} columns of {tensor.name!r} in INT4 cannot be divided among "
                f"{part.whole[1] // tensor.shape[1]} processes: groups of {INT4_GROUP_SIZE} share a scale",
                f"use another number with --tensor-parallel{whole}, or use --quant int8",
            )


def is_quantized(name: str, tensor: TensorHeader, config: ModelConfig) -> bool:
    """Return whether it is a matrix of a layer, or the head, that quantization recipes quantize."""
    return is_multiplied(name, tensor, config) and not UNQUANTIZED_MATRIX.fullmatch(name)


def sum_by_use(header: Header, config: ModelConfig, size: TensorSize) -> WeightBytes:
    """Sum up the tensors' sizes by how a step reads them."""
    sizes = {"layers": 0, "experts": 0, "head": 0, "tables": 0}
    for name, tensor in header.tensors.items():
        if not (config.tie_embeddings and name.startswith("lm_head.")):  # stored twice, read once
            sizes[use_of(name, config.tie_embeddings)] += size(name, tensor)
    return WeightBytes(**sizes)


def use_of(name: str, tied: bool) -> str:
    """Return the field of WeightBytes in which a tensor is counted."""
    if name.startswith("lm_head.") or (tied and name.startswith("embed_tokens.")):
        return "head"
    if name.startswith(("embed_tokens.", f"{PER_LAYER_TABLE}.")):
        return "tables"
    return "experts" if ".mlp.experts." in name else "layers"


def loaded_bytes(header: Header, name: str, tensor: TensorHeader, dtype: str, device: str) -> int:
    """Return the memory of a tensor as loaded.

    Floats are in `dtype`, and so is FP8 without a kernel; GGUF matrices without another layout, matrices that
    kernels widen, and tables that are looked up by row stay as stored.
    """
    element, vector = ELEMENT_BYTES[dtype], len(tensor.shape) < 2
    if name.startswith(f"{PER_LAYER_TABLE}."):
        return tensor.nbytes
    module, _, suffix = name.rpartition(".")
    if suffix in PACKED_SUFFIXES and (matrix := find_packed_matrix(header, module)):
        if suffix in ORDER_SUFFIXES and module.endswith(SHARED_ORDER):
            return 0
        is_split = SPLIT_MATRIX.fullmatch(name)
        if not is_split and stays_packed(matrix.format, device):
            return part_bytes(matrix, suffix, device)
        return matrix.rows * matrix.columns * element if suffix in CODE_SUFFIXES else 0
    if tensor.dtype == "U8":  # parts of MXFP4
        return tensor.elements if device == "cpu" else mxfp4_planes_bytes(tensor)
    if SPLIT_MATRIX.fullmatch(name):
        return tensor.elements * element
    if CONVOLUTION_TAPS.fullmatch(name) or (vector and name.rpartition(".")[2] not in MODEL_DTYPE_VECTORS):
        return tensor.elements * FLOAT32_BYTES
    if tensor.offset is not None and not vector:
        return tensor.nbytes
    return tensor.elements * (dense_element_bytes(tensor, dtype, device) if is_matrix(name, tensor) else element)


def is_matrix(name: str, tensor: TensorHeader) -> bool:
    """Return whether products or the embedding read it as a matrix."""
    return name.endswith(".weight") and len(tensor.shape) == 2 and not name.startswith(ENCODER_TABLES)


def dense_element_bytes(tensor: TensorHeader, dtype: str, device: str) -> int:
    """Return the bytes of an element of a dense matrix as loaded."""
    return ELEMENT_BYTES[matrix_dtype_for(tensor.dtype, dtype, device)]


def gguf_packed_bytes(tensor: TensorHeader, dtype: str, device: str) -> int | None:
    """Return the memory of a GGUF matrix in interleaved or packed GPU layout; None if its layout does not
    change.
    """
    block_format = tensor.dtype.lower()
    if tensor.offset is None:
        return None
    rows, columns = tensor.shape
    if device != "cpu":
        dense_bytes = (
            rows * columns * ELEMENT_BYTES[dtype]
            if block_format in GGUF_PLAIN and block_format != GGUF_DTYPE_NAMES[dtype]
            else None
        )
        return gguf_gpu_packed_bytes(block_format, rows, columns) or dense_bytes
    if block_format not in GGUF_INTERLEAVED_BYTES:
        return None
    return (
        -(-rows // TILE_ROWS)
        * TILE_ROWS
        * columns
        // BLOCK_TYPE_BY_NAME[block_format].block_elements
        * GGUF_INTERLEAVED_BYTES[block_format]
    )


def mxfp4_planes_bytes(tensor: TensorHeader) -> int:
    """Return the memory of the codes [rows, groups, 16] or scales [rows, groups] of an MXFP4 matrix on a GPU."""
    rows, groups, *codes = tensor.shape
    sizes = gpu_packed_size(rows, groups * MXFP4_GROUP_SIZE, MXFP4_GROUP_SIZE, GPU_PACKED_BITS[MXFP4])
    assert sizes
    return sizes[0] if codes else sizes[1]


def part_bytes(matrix: PackedMatrix, suffix: str, device: str) -> int:
    """Return the memory of one tensor of a quantized matrix, in interleaved or packed GPU layout."""
    codes, scales = matrix.code_bytes, matrix.rows * matrix.group_count
    bits = {INT4: 4, INT8: 8}.get(matrix.format)
    if device != "cpu" and matrix.format in GPU_PACKED_BITS:
        packed = gpu_packed_size(matrix.rows, matrix.columns, matrix.group_size, GPU_PACKED_BITS[matrix.format])
        codes, scales = packed or (codes, scales)
    elif device == "cpu" and bits and (group := interleaved_group(matrix.group_size, matrix.columns, bits)):
        rows, columns = -(-matrix.rows // TILE_ROWS) * TILE_ROWS, interleaved_columns(group, matrix.columns)
        codes, scales = rows * columns * bits // 8, rows * columns // group
    if suffix in CODE_SUFFIXES:
        return codes
    if suffix in SCALE_SUFFIXES:
        return scales * DTYPE_BYTES[matrix.scale_dtype]
    if suffix in ("qzeros", "weight_zero_point"):
        return scales * matrix.has_zeros
    return matrix.columns * ORDER_BYTES * matrix.act_order if suffix in ORDER_SUFFIXES else 0


def is_multiplied(name: str, tensor: TensorHeader, config: ModelConfig) -> bool:
    """Return whether x is multiplied by it: a matrix of a layer, or the head."""
    return is_matrix(name, tensor) and (
        name.startswith("layers.") or use_of(name, config.tie_embeddings) == "head"
    )


def quantized_bytes(tensor: TensorHeader, quant: str, scale: int, device: str) -> int:
    """Return the memory of a matrix quantized by `--quant`. scale: bytes of a scale

    int8: a byte per element and a scale per row; int4: half a byte, and a scale per 128 columns.
    """
    rows, columns = tensor.shape
    scale_dtype = "F32" if scale == FLOAT32_BYTES else "F16"
    if quant == INT8:
        matrix = PackedMatrix(INT8, rows, columns, group_count=1, group_size=None, scale_dtype=scale_dtype)
    else:
        matrix = PackedMatrix(
            INT4,
            rows,
            columns,
            group_count=-(-columns // INT4_GROUP_SIZE),
            group_size=INT4_GROUP_SIZE,
            scale_dtype=scale_dtype,
        )
    return part_bytes(matrix, "weight", device) + part_bytes(matrix, "weight_scale", device)


def gguf_bytes(tensor: TensorHeader, quant: str, use: str) -> int:
    """Return the approximate size in a published GGUF file. use: see `use_of`"""
    is_uneven = quant == "q4_k_m" and tensor.shape[1] % K_QUANT_BLOCK
    bits = UNEVEN_BITS if is_uneven else GGUF_BITS[quant]
    return round(tensor.elements * bits[use] / 8)


def representative_matrix(header: Header) -> TensorHeader | PackedMatrix:
    """Return a representative matrix of the layers: the largest in the format that most of their bytes have.

    Among equal ones, it is the one with the most rows. Raises DamagedModel if the layers have no matrix.
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
        raise DamagedModel(f"{header.path} contains no matrix of a layer", "fetch the model again")
    most_frequent = max(sizes, key=lambda dtype: sizes[dtype])
    name, tensor = max(
        ((name, tensor) for name, tensor in matrices.items() if tensor.dtype == most_frequent),
        key=lambda item: (item[1].elements, item[1].shape[0]),
    )
    return find_packed_matrix(header, name.rpartition(".")[0]) or tensor
