"""The memory pool of a captured graph, overwritten between two replays."""

from collections.abc import Iterator

import torch
from torch import Tensor


class Bytes:
    """Device memory at an address, in a form that torch accepts."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            **{"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None},
        }


def free_parts(pool: tuple[int, int], device: torch.device) -> Iterator[Tensor]:
    """Yield the free blocks of a graph's pool as uint8 tensors, which a replay must write before it reads."""
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment.get("segment_pool_id", ())) != tuple(pool) or segment["device"] != (device.index or 0):
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            start = block.get("address", address)
            if block["state"] == "inactive":
                yield torch.as_tensor(Bytes(start, block["size"]), device=device)
            address += block["size"]


def poison(pool: tuple[int, int], device: torch.device) -> int:
    """Set every byte to 255, which is NaN in bfloat16, float16 and float32; return the number of bytes."""
    total = 0
    for part in free_parts(pool, device):
        part.fill_(255)
        total += part.numel()
    return total
