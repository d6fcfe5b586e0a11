"""What an error of torch means: memory that one step has not found, or a GPU on which nothing can run any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from localllm.errors import LocalLLMError


def is_out_of_memory(error: Exception) -> bool:
    """Can the next step, or a smaller one, find the memory that this one did not?"""
    says = str(error)
    signs = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in says for sign in signs)


def is_gpu_failure(error: Exception) -> bool:
    """Has a kernel broken off? Whatever this process does on the GPU fails from then on (CUDA C++ Programming
    Guide, section on error checking)."""
    told = any(
        sign in str(error) for sign in ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuDNN error")
    )
    return not is_out_of_memory(error) and (isinstance(error, torch.AcceleratorError) or told)


def gpu_failure_error(error: Exception) -> LocalLLMError:
    """What to tell of a GPU that failed, without the advice that torch writes below its first line."""
    what = str(error).partition("\n")[0] or type(error).__name__
    return LocalLLMError(f"the GPU broke off ({what})", "load the model again, in a new process")


@contextmanager
def translate_device_errors(shortage: Callable[[], LocalLLMError]) -> Iterator[None]:
    """Turns such errors into sentences. shortage: makes the one about memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise shortage() from None
        if is_gpu_failure(error):
            raise gpu_failure_error(error) from None
        raise
