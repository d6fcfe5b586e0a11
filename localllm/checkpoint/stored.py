"""Bytes of a checkpoint's tensor, wherever they lie, as the tensor that the runtime has."""

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
    """raw: uint8 [entry.nbytes] -> plain numbers in their dtype and shape, blocks of GGUF as uint8 [..., bytes of
    a row]; a view where nothing has to change its place."""
    if entry.offset is None:
        shape = tuple(reversed(entry.shape)) if entry.transposed else entry.shape
        return arrange(raw.view(TORCH_DTYPES[entry.dtype]).view(shape), entry)
    plain = PLAIN_DTYPES.get(entry.dtype.lower())
    tensor = raw.view(plain).view(entry.shape) if plain else raw.view(*entry.shape[:-1], -1)
    if entry.heads is None:
        return tensor
    return tensor.index_select(0, half_split_order(*entry.heads, len(tensor)).to(tensor.device))


def arrange(tensor: Tensor, entry: TensorHeader) -> Tensor:
    """As the runtime has it: [out, in], gate before up. tensor: as the file has it."""
    if entry.transposed:
        tensor = tensor.T
    return torch.cat((tensor[::2], tensor[1::2])) if entry.interleaved else tensor


def half_split_order(heads: int, size: int, rows: int) -> Tensor:
    """Which stored row stands where: of each head the even ones, then the odd ones; rows after the heads stay."""
    order = torch.arange(rows)
    turned = order[: heads * size].view(heads, -1, 2).transpose(1, 2).flatten()
    return torch.cat((turned, order[heads * size :]))
