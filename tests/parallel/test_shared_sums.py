"""Sums through shared memory are those of torch, in every order in which ranks arrive."""

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.arch.stages import Position
from localllm.parallel import shared_sums
from localllm.parallel.channel import open_memory
from localllm.parallel.group import Collectives
from localllm.parallel.shared_sums import SharedSums, memory_bytes, shared_sums_supported

pytestmark = pytest.mark.skipif(
    not shared_sums_supported(), reason="kernels cannot be compiled for this processor"
)


def run_ranks(ranks: int, work: Callable[[SharedSums], Any], check: Callable[[float], object]) -> list[Any]:
    """Return the results of `work` of each rank, all of which run at once in threads."""
    descriptor = open_memory(memory_bytes(ranks))
    members = [SharedSums(descriptor, rank, ranks, check) for rank in range(ranks)]
    os.close(descriptor)
    results: list[Any] = [None] * ranks

    def run(member: SharedSums) -> None:
        with torch.inference_mode():  # a setting of each thread
            results[member.rank] = work(member)

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def fail_when_late(waited_s: float) -> None:
    if waited_s > 20:
        raise TimeoutError


def inputs(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    sizes = [(1, 64), (3, 5), (0, 7), (1, 1), (40, 33)] * 20
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_sum(ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sums, "PART_BYTES", 1024)  # so that the largest are summed piece by piece

    def work(member: SharedSums) -> list[Tensor]:
        delays = random.Random(member.rank)
        results = []
        for x in inputs(member.rank, dtype):
            if delays.random() < 0.1:
                time.sleep(0.001)
            results.append(member.all_reduce(x))
        return results

    results = run_ranks(ranks, work, fail_when_late)
    expected = [
        torch.stack(parts).float().sum(0).to(dtype)
        for parts in zip(*(inputs(rank, dtype) for rank in range(ranks)), strict=True)
    ]
    for result in results:
        assert all(map(torch.equal, result, expected))


def test_all_ranks_get_what_each_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sums, "PART_BYTES", 1024)

    def work(member: SharedSums) -> list[Tensor]:
        return [each for x in inputs(member.rank, torch.bfloat16) for each in gathered_and_summed(member, x)]

    def gathered_and_summed(member: SharedSums, x: Tensor) -> tuple[Tensor, Tensor]:
        return member.all_gather(x), member.all_reduce(x)

    first, *others = run_ranks(3, work, fail_when_late)
    whole = zip(*(inputs(rank, torch.bfloat16) for rank in range(3)), strict=True)
    assert all(map(torch.equal, first[::2], [torch.cat(parts, 1) for parts in whole]))
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_a_sum_replaces_the_tensor() -> None:
    def work(member: SharedSums) -> bool:
        x = torch.full((2, 3), float(member.rank + 1))
        columns = torch.ones(3, 2).T
        is_in_place = member.all_reduce(x) is x
        return is_in_place and bool(x.eq(3).all()) and bool(member.all_reduce(columns).eq(2).all())

    assert run_ranks(2, work, fail_when_late) == [True, True]


def test_a_rank_that_waits_in_vain_raises_what_the_check_raises() -> None:
    def work(member: SharedSums) -> str | None:
        if member.rank:
            return None
        with pytest.raises(ConnectionError) as error:
            member.all_reduce(torch.ones(4))
        return str(error.value)

    def check(waited_s: float) -> None:
        raise ConnectionError(f"ended before {waited_s >= shared_sums.YIELD_S}")

    assert run_ranks(2, work, check) == ["ended before True", None]


def test_gloo_gives_the_same_where_there_is_no_shared_memory(tmp_path: Path) -> None:
    """Sums, gathered columns and what the first rank has, of two ranks with connections of their own."""

    def work(rank: int) -> list[Tensor]:
        member = Collectives(Position(rank, 2), tmp_path, torch.device("cpu"))
        member.connect()
        x = torch.arange(6.0).view(2, 3) + 10 * rank
        shared = [member.all_reduce(x.clone()), member.all_gather(x), member.gather_columns(x.clone())]
        member.broadcast(x)
        return [*shared, member.gather_columns(x[:0]), x]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, range(2))
    x = torch.arange(6.0).view(2, 3)
    columns = torch.cat([x, x + 10], -1)
    expected = [2 * x + 10, columns, columns, torch.empty(0, 6), x]
    assert all(map(torch.equal, first, expected))
    expected[2] = x + 10  # logits are gathered in the first rank alone
    assert all(map(torch.equal, second, expected))
