"""Device errors in the words of torch and Triton."""

import pytest
import torch

from localllm.runtime.device_errors import gpu_failure_error, is_gpu_failure, is_out_of_memory

ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_out_of_memory_is_distinguished_from_a_failed_gpu(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_gpu_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ILLEGAL),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    ],
    ids=str,
)
def test_a_failed_gpu_is_distinguished_from_our_own_errors(error: Exception) -> None:
    assert is_gpu_failure(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("CPU"), RuntimeError("shapes do not fit"), KeyError("x")], ids=str)
def test_a_fault_of_ours_is_neither(error: Exception) -> None:
    assert not is_gpu_failure(error)
    assert not is_out_of_memory(error)


def test_a_failed_gpu_is_reported_in_one_line() -> None:
    told = gpu_failure_error(torch.AcceleratorError(ILLEGAL))
    assert str(told) == (
        "the GPU failed (CUDA error: an illegal memory access was encountered); "
        "load the model again, in a new process"
    )
