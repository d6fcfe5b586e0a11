"""Converts the bytes of a checkpoint's tensor, wherever they are, to the runtime's layout."""

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.quant.formats.gguf import PLAIN_DTYPES

TORCH_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}


def decode_tensor(raw: Tensor, entry: TensorHeader) -> Tensor:
    """Convert raw [entry.nbytes] uint8 to a tensor in its dtype and shape; blocks of GGUF stay uint8 [..., row
    bytes].

    It is a view unless elements have to be reordered.
    """
    if entry.offset is None:
        shape = tuple(reversed(entry.shape)) if entry.transposed else entry.shape
        return arrange(raw.view(TORCH_DTYPES[entry.dtype]).view(shape), entry)
    dtype = PLAIN_DTYPES.get(entry.dtype.lower())
    tensor = raw.view(dtype).view(entry.shape) if dtype else raw.view(*entry.shape[:-1], -1)
    if entry.heads is None:
        return tensor
    return tensor.index_select(0, half_split_order(*entry.heads, len(tensor)).to(tensor.device))


def arrange(tensor: Tensor, entry: TensorHeader) -> Tensor:
    """Convert a tensor in the file's layout to the runtime's: [out, in], gate before up."""
    if entry.transposed:
        tensor = tensor.T
    return torch.cat((tensor[::2], tensor[1::2])) if entry.interleaved else tensor


def half_split_order(heads: int, size: int, rows: int) -> Tensor:
    """Return the order of rows that puts each head's even rows first, then the odd ones; rows after the heads
    stay.
    """
    order = torch.arange(rows)
    heads_order = order[: heads * size].view(heads, -1, 2).transpose(1, 2).flatten()
    return torch.cat((heads_order, order[heads * size :]))
