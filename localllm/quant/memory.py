"""Memory for what is read again and again."""

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21  # bytes


def empty_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized, on the CPU; in huge pages where the system gives them when asked."""
    made = torch.empty(shape, dtype=dtype)
    begin = -(-made.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (made.data_ptr() + made.nbytes - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # Advice: where it is not taken, pages are small.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return made
