"""Faults planted in the PTX of the project's own kernels: the machine finds each, whatever the order of threads.

Only with SOFTWARE_GPU (tests/software_gpu.py), so the name is not that of a test file: `test_software_gpu.py`
runs it.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from localllm.arch.config import AttentionConfig
from localllm.runtime.kernels.gpu.decode import attention_decode
from localllm.runtime.kernels.gpu.launch import RecordedLaunch
from localllm.runtime.kernels.gpu.norms import rms_norm
from localllm.runtime.kernels.gpu.prefill import attention_prefill
from localllm.runtime.kernels.gpu.rope_decode import rope_decode
from localllm.runtime.kernels.gpu.small_m_linear import small_m_matmul
from tests.runtime.kernels.gpu import test_attention, test_rope_decode
from tests.runtime.kernels.gpu.test_small_m import planes, random
from tools.ptx.device import Executable, SoftwareGpu
from tools.ptx.memory import (
    Fault,
    MisalignedError,
    OutOfBoundsError,
    PrematureError,
    RaceError,
    UninitializedError,
)

EARLY = (RaceError, UninitializedError)  # which one depends on the order of warps
ATTENTION = AttentionConfig(4, 2, 16, None, 0.3)


def norm() -> object:
    return rms_norm(random(3, 300).bfloat16(), torch.ones(300), 1e-5)


def matmul() -> object:
    return small_m_matmul(random(5, 1024).bfloat16(), planes("int4", 40, 1024, 128), None)


def few_tokens() -> object:
    return attend(attention_decode, [(70, 3)])


def many_tokens() -> object:
    return attend(attention_prefill, [(150, 130)])


def new_tokens() -> object:
    return rope_decode(*test_rope_decode.arguments(test_rope_decode.NORMED, torch.bfloat16, torch.bfloat16))


def attend(kernel: Callable[..., object], spans: test_attention.Spans) -> object:
    batch, q = test_attention.step(spans), test_attention.queries(spans, ATTENTION)
    cache = test_attention.filled(batch, ATTENTION, torch.bfloat16, spans, torch.bfloat16)
    return kernel(q, cache, batch, ATTENTION, None)


def drop(pattern: str) -> Callable[[str], str]:
    return substitute(pattern, "")


def substitute(pattern: str, new: str) -> Callable[[str], str]:
    def change(ptx: str) -> str:
        changed, count = re.subn(pattern, new, ptx)
        assert count, pattern
        return changed

    return change


def wait_for_fewer(ptx: str) -> str:
    """Let each wait leave a group more in flight."""
    return re.sub(r"wait_group\s+(\d+)", lambda match: f"wait_group {int(match[1]) + 1}", ptx)


BARRIERS, GUARD = r"\tbar\.sync\s+0;", r"@%p\d+ "
CASES: list[tuple[str, Callable[[], object], str, Callable[[str], str], type[Fault] | tuple[type[Fault], ...]]] = [
    ("no barriers", norm, "norm_kernel", drop(BARRIERS), EARLY),
    ("no barriers", matmul, "small_m_packed_kernel", drop(BARRIERS), EARLY),
    ("no barriers", few_tokens, "decode_kernel", drop(BARRIERS), EARLY),
    ("no barriers", new_tokens, "rope_decode_kernel", drop(BARRIERS), EARLY),
    ("no barriers", many_tokens, "prefill_kernel", drop(BARRIERS), EARLY),
    ("a group too few", matmul, "small_m_packed_kernel", wait_for_fewer, RaceError),
    ("a group too few", few_tokens, "decode_kernel", wait_for_fewer, RaceError),
    ("a group too few", new_tokens, "rope_decode_kernel", wait_for_fewer, RaceError),
    ("a group too few", many_tokens, "prefill_kernel", wait_for_fewer, RaceError),
    ("a relaxed ticket", matmul, "small_m_packed_kernel", substitute("acq_rel", "relaxed"), RaceError),
    (
        "a wider load",
        norm,
        "norm_kernel",
        substitute(r"ld\.global\.b16 \{ (%rs\d+) \}, \[ (%rd\d+) \+ 0", r"ld.global.b16 { \1 }, [ \2 + 1"),
        MisalignedError,
    ),
    ("no mask", few_tokens, "decode_kernel", substitute(GUARD + r"(ld\.global\.b32)", r"\1"), OutOfBoundsError),
    ("no mask", norm, "norm_kernel", substitute(GUARD + r"(st\.global)", r"\1"), (OutOfBoundsError, RaceError)),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fault", "call", "kernel", "change", "error"), CASES)
def test_planted_faults(
    fault: str,
    call: Callable[[], object],
    kernel: str,
    change: Callable[[str], str],
    error: type[Fault],
    seed: int,
) -> None:
    gpu = SoftwareGpu(seed)
    with gpu:
        call()
    gpu.edit = planted(kernel, change)
    with pytest.raises(error, match=kernel), gpu:
        call()


@pytest.mark.parametrize("call", [norm, matmul, few_tokens, new_tokens, many_tokens])
def test_no_kernel_may_do_without_its_wait(call: Callable[[], object]) -> None:
    gpu = SoftwareGpu(pdl=True)
    with gpu:
        call()
    gpu.edit = planted("", drop(r"griddepcontrol\.wait ?;"))
    with pytest.raises(PrematureError), gpu:
        call()


def planted(kernel: str, change: Callable[[str], str]) -> Callable[[RecordedLaunch, Executable], Executable]:
    def edit(launch: RecordedLaunch, executable: Executable) -> Executable:
        if kernel and launch.kernel.__name__ != kernel:
            return executable
        return replace(executable, ptx=change(executable.ptx))

    return edit
