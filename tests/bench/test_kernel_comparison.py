"""The kernel comparison detects wrong kernels; shown on a CPU, so that no GPU is needed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.benchmark.gpu.self_test import compared, converted
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.registry import KERNELS, prefer_kernel
from localllm.runtime.kv_cache.tensors import KVCache
from tests.gpu.steps import drawn, greedy, run, text
from tests.tiny import CPU, make_checkpoint, make_engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    make_checkpoint(tmp_path, "Qwen3")
    yield make_engine(tmp_path)


def walk(engine: Engine) -> None:
    run(engine, [greedy(text(9, 320, 0), 3), drawn(text(20, 320, 1), 3, 1)])


def test_right_kernels_pass(engine: Engine) -> None:
    product = KERNELS["fused_linear"][-1].run
    append = KERNELS["rope_append"][-1].run
    with (
        prefer_kernel("fused_linear", lambda *a: product(*a).clone()),
        prefer_kernel("rope_append", lambda *a: append(*a)),
        compared() as findings,
    ):
        walk(engine)
    assert not findings.wrong
    assert findings.ran["fused_linear/preferred"] > 20 and findings.ran["rope_append/preferred"] > 5


def test_a_wrong_result_is_detected(engine: Engine) -> None:
    product = KERNELS["fused_linear"][-1].run
    with prefer_kernel("fused_linear", lambda *a: product(*a) * 1.001), compared() as findings:
        walk(engine)
    assert findings.wrong


def test_a_cache_that_is_written_wrongly_is_detected(engine: Engine) -> None:
    append = KERNELS["rope_append"][-1].run

    def skewed(qkv: Tensor, cache: KVCache, *rest: object) -> object:
        found = append(qkv, cache, *rest)
        cache.v *= 1.001
        return found

    with prefer_kernel("rope_append", skewed), compared() as findings:
        walk(engine)
    assert findings.wrong and all(fault.startswith("rope_append") for fault in findings.wrong)


def test_copies_share_no_memory_with_the_original() -> None:
    cache = KVCache(2, 8, 1, 4, torch.float32, CPU)
    cache.k.fill_(1)
    (twin, again), number = converted(((cache, cache), 3), torch.float64)
    twin.k.fill_(2)
    assert (cache.k == 1).all() and again is twin and twin.k.dtype == torch.float64 and number == 3
