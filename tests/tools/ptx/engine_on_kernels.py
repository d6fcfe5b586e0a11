"""A prompt and ten steps of a trained model, every kernel for GPUs on the software GPU: the tokens of the CPU.

Only with SOFTWARE_GPU, so the name is not that of a test file: `test_software_gpu.py` runs it.
"""

from pathlib import Path

import pytest
import torch

from localllm.runtime.engine import Engine
from localllm.text.tokenizer import Tokenizer
from tests.gpu.steps import greedy, run
from tests.shared import shared
from tests.tiny import make_engine
from tests.torch_alone import no_instructions
from tools.ptx.device import SoftwareGpu

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside"
STEPS = 10


@pytest.fixture(scope="module")
def folder() -> Path:
    return shared("stories260K")


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return list(Tokenizer.from_folder(folder).encode(PROMPT))


def answer(engine: Engine, prompt: list[int]) -> list[tuple[int, float]]:
    return run(engine, [greedy(prompt, STEPS)])[0]


@pytest.mark.parametrize(
    ("dtype", "graphs", "pdl"), [(torch.float32, False, False), (torch.bfloat16, True, True)], ids=str
)
def test_the_engine_gives_the_tokens_of_the_cpu(
    folder: Path, prompt: list[int], dtype: torch.dtype, graphs: bool, pdl: bool
) -> None:
    expected = answer(make_engine(folder, dtype), prompt)
    with no_instructions(), SoftwareGpu(seed=1, pdl=pdl) as gpu:  # torch does what is not a kernel for GPUs
        got = answer(make_engine(folder, dtype, graphs=graphs), prompt)
    ran = {launch.kernel for launch in gpu.launches}
    assert {"norm_kernel", "rope_append_kernel", "prefill_kernel", "rope_decode_kernel", "combine_kernel"} <= ran
    assert ({"begin_step_kernel", "greedy_kernel", "end_step_kernel"} <= ran) == graphs
    attending = [launch.opcodes for launch in gpu.launches if launch.kernel == "rope_decode_kernel"]
    assert all(
        ("prefetch.global.L2" in opcodes) == pdl for opcodes in attending
    )  # before it waits for the queries
    assert [token for token, _ in got] == [token for token, _ in expected]
    allowed = 1e-4 if dtype == torch.float32 else 0.05
    assert max(abs(a - b) for (_, a), (_, b) in zip(got, expected, strict=True)) < allowed
