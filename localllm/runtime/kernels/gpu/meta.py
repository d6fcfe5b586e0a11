"""Tensors without memory, for compiling kernels for GPUs that are not here."""

import torch
from torch import Tensor

from localllm.quant.packing import chunk_words, gpu_packed_columns
from localllm.quant.tensor import QuantizedTensor

BITS = {"int4": 4, "q4_k": 4, "mxfp4": 4, "int8": 8, "q6_k": 8, "fp8": 8}
FORMATS = {4: "int4_planes", 8: "int8_planes"}
K_BLOCK = 256  # columns
ROWS = 16


def meta_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_packed_weight(kind: str, rows: int, columns: int, group: int | None) -> QuantizedTensor:
    """Return a weight in the packed GPU layout of INT4, INT8, a K-quant or a float format."""
    bits = BITS[kind]
    words = chunk_words(group, columns, bits)
    assert words
    padded_columns, padded_rows = gpu_packed_columns(words, columns, bits), -(-rows // ROWS) * ROWS
    chunks, groups = padded_columns * bits // 16 // words, -(-padded_columns // (group or padded_columns))
    q = meta_tensor(padded_rows // ROWS, chunks, ROWS, words, dtype=torch.int16)
    gpu_format = {"mxfp4": "mxfp4_planes", "fp8": "fp8_planes"}.get(kind, FORMATS[bits])
    parts = {"q": q}
    if kind in ("q4_k", "q6_k"):
        parts |= {"scale": meta_tensor(groups, padded_rows, dtype=torch.int8)}
        parts |= {"block_scale": meta_tensor(padded_columns // K_BLOCK, padded_rows, dtype=torch.float16)}
        if kind == "q4_k":
            parts |= {"minimum": parts["scale"], "block_minimum": parts["block_scale"]}
    else:
        scales = {"mxfp4": torch.uint8, "fp8": torch.float32}
        parts["scale"] = meta_tensor(groups, padded_rows, dtype=scales.get(kind, torch.bfloat16))
    return QuantizedTensor(gpu_format, (rows, columns), parts, group)
