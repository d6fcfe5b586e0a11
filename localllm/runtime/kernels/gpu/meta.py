"""Tensors without memory, to compile kernels with for GPUs that are not here."""

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
    """A weight in planes of INT4 or INT8, or of the K-quants or floats that lie so."""
    bits = BITS[kind]
    words = chunk_words(group, columns, bits)
    assert words
    stored, tall = gpu_packed_columns(words, columns, bits), -(-rows // ROWS) * ROWS
    chunks, groups = stored * bits // 16 // words, -(-stored // (group or stored))
    q = meta_tensor(tall // ROWS, chunks, ROWS, words, dtype=torch.int16)
    form = {"mxfp4": "mxfp4_planes", "fp8": "fp8_planes"}.get(kind, FORMATS[bits])
    parts = {"q": q}
    if kind in ("q4_k", "q6_k"):
        parts |= {"scale": meta_tensor(groups, tall, dtype=torch.int8)}
        parts |= {"block_scale": meta_tensor(stored // K_BLOCK, tall, dtype=torch.float16)}
        if kind == "q4_k":
            parts |= {"minimum": parts["scale"], "block_minimum": parts["block_scale"]}
    else:
        scales = {"mxfp4": torch.uint8, "fp8": torch.float32}
        parts["scale"] = meta_tensor(groups, tall, dtype=scales.get(kind, torch.bfloat16))
    return QuantizedTensor(form, (rows, columns), parts, group)
