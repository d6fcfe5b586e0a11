"""What an error of torch means: memory that one step has not found, or a GPU on which nothing can run any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from localllm.errors import LocalLLMError


def out_of_memory(error: Exception) -> bool:
    """Can the next step, or a smaller one, find the memory that this one did not?"""
    says = str(error)
    signs = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in says for sign in signs)


def gpu_failed(error: Exception) -> bool:
    """Has a kernel broken off? Whatever this process does on the GPU fails from then on (CUDA C++ Programming
    Guide, section on error checking)."""
    told = any(
        sign in str(error) for sign in ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuDNN error")
    )
    return not out_of_memory(error) and (isinstance(error, torch.AcceleratorError) or told)


def broken(error: Exception) -> LocalLLMError:
    """What to tell of a GPU that failed, without the advice that torch writes below its first line."""
    what = str(error).partition("\n")[0] or type(error).__name__
    return LocalLLMError(f"the GPU broke off ({what})", "load the model again, in a new process")


@contextmanager
def telling(shortage: Callable[[], LocalLLMError]) -> Iterator[None]:
    """Turns such errors into sentences. shortage: makes the one about memory."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise shortage() from None
        if gpu_failed(error):
            raise broken(error) from None
        raise
