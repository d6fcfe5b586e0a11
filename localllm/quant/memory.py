"""Allocation of memory that is read repeatedly."""

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21


def empty_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized CPU tensor, in huge pages if the system provides them."""
    tensor = torch.empty(shape, dtype=dtype)
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # Only advice: the system may use small pages.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor
