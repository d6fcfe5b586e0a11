"""Classifies errors of steps: out of memory in one step, or a failure after which nothing can run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from localllm.errors import LocalLLMError, RankFailed


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means that memory ran out, so that the next or a smaller step may succeed."""
    message = str(error)
    signs = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in message for sign in signs)


def is_gpu_failure(error: Exception) -> bool:
    """Return whether a kernel failed, after which every GPU operation of this process fails.

    CUDA C++ Programming Guide, section on error checking.
    """
    has_sign = any(
        sign in str(error) for sign in ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuDNN error")
    )
    return not is_out_of_memory(error) and (isinstance(error, torch.AcceleratorError) or has_sign)


def gpu_failure_error(error: Exception) -> LocalLLMError:
    """Return an error for a failed GPU, without the advice that torch adds below its first line."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    return LocalLLMError(f"the GPU failed ({reason})", "load the model again, in a new process")


def is_engine_failure(error: Exception) -> bool:
    """Return whether no further step can run: a GPU or another rank has failed."""
    return isinstance(error, RankFailed) or is_gpu_failure(error)


def engine_failure_error(error: Exception) -> LocalLLMError:
    """Return the error to report for a failure after which no further step can run."""
    return error if isinstance(error, RankFailed) else gpu_failure_error(error)


@contextmanager
def translate_device_errors(shortage: Callable[[], LocalLLMError]) -> Iterator[None]:
    """Translate torch's errors of the device to errors of localllm. shortage: creates the out-of-memory error."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise shortage() from None
        if is_gpu_failure(error):
            raise gpu_failure_error(error) from None
        raise
