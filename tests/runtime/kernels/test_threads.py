"""Threads of parallel operations: their settings are the caller's, and OpenMP's end while their model is idle."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from localllm.quant.formats import gguf
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels import linear
from localllm.runtime.kernels.batch_invariance import batch_invariance, batch_invariant
from localllm.runtime.kernels.threads import openmp, run_in_parts
from tests.runtime.kernels.harness import needs_compiled


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_thread_inherits_batch_invariance() -> None:
    for wanted in (True, False):
        seen: list[bool] = []
        with batch_invariance(wanted):
            run_in_parts(lambda part, parts, seen=seen: seen.append(batch_invariant()))
        assert seen == [wanted] * 2


@needs_compiled
def test_gguf_rows_have_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = 1100, 512
    # Bytes below 60 make scales that are small and finite.
    packed = torch.randint(
        0, 60, (rows, BLOCK_TYPE_BY_NAME["q8_0"].row_bytes(columns)), generator=generator
    ).byte()
    weight, x = QuantizedTensor("q8_0", (rows, columns), {gguf.BLOCKS_PART: packed}), torch.randn(40, columns)
    with batch_invariance(True):
        assert torch.equal(linear(x, weight), torch.cat([linear(row[None], weight) for row in x]))


needs_openmp = pytest.mark.skipif(
    not openmp() or not Path("/proc/self/task").exists(), reason="needs Linux and a torch with GNU OpenMP"
)
COUNT = """
import os, time
import torch
import localllm
from localllm.runtime.kernels.threads import end_openmp_threads

def count():
    return len(os.listdir("/proc/self/task"))

def count_ended(expected):  # ended threads are listed for a moment
    deadline = time.monotonic() + 60
    while count() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()
"""


def run_script(script: str) -> list[int]:
    command = [sys.executable, "-c", COUNT + script]
    return [
        int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    ]


@needs_openmp
def test_openmp_threads_end_and_start_again() -> None:
    script = """
torch.set_num_threads(3)
start = count()
numbers = torch.ones(1_000_000)
for _ in range(2):
    numbers += 1; print(count() - start); end_openmp_threads(); print(count_ended(start) - start)
assert (numbers == 3).all()
"""
    assert run_script(script) == [2, 0, 2, 0]


@needs_openmp
def test_a_loaded_model_without_work_keeps_no_openmp_threads() -> None:
    # More threads than processors would wake up for each operation instead of spinning.
    script = """
os.environ["LOCALLLM_THREADS"] = "2"
with localllm.load("demo", device="cpu") as llm:
    loaded = count()
    end_openmp_threads()
    print(loaded - count_ended(loaded - 1))
    llm.generate("Once upon a time, there was a fox. " * 5, localllm.SamplingParams(max_tokens=4))
    print(count_ended(loaded) - loaded)
"""
    assert run_script(script) == [0, 0]
