"""Tiers below the KV cache: a conversation that was evicted comes back at the speed of its tier."""

from dataclasses import replace

import pytest

from localllm.errors import UsageError
from localllm.runtime.kv_cache.disk_tier import FILE_S
from localllm.runtime.step import StepShape
from localllm.simulate.load import LoadPlan, Turn
from localllm.simulate.simulation import EngineSetup, Simulated, simulate
from localllm.simulate.tiers import TierSetup, parse_tier
from tests.simulate.engines import LinearCost

BLOCK_BYTES, HOST_RATE, DISK_RATE = 16_000.0, 4e7, 2e7
# 40 of 60 blocks, then others that take 57 of them, then the first ones again, and 10 more tokens.
TURNS = (
    Turn(0.0, ((1, 640),), 1, 10),
    Turn(10.0, ((2, 900),), 1, 11),
    Turn(20.0, ((1, 640), (3, 10)), 1, 12),
)
SETUP = EngineSetup(60, 16, 2048, 8, 1024, asynchronous=False)
HOST = TierSetup(host_blocks=100, host_bandwidth=HOST_RATE, block_bytes=BLOCK_BYTES)
DISK = TierSetup(disk_blocks=100, disk_bandwidth=DISK_RATE, block_bytes=BLOCK_BYTES)
COMPUTE_S = LinearCost().seconds(StepShape(0, 0, 0, 1, 10, 650, sum(range(641, 651))), 0)


def run(tiers: TierSetup) -> Simulated:
    load = LoadPlan(trace=TURNS, requests=len(TURNS))
    return simulate(load, replace(SETUP, tiers=tiers), LinearCost())


def test_without_tiers_an_evicted_prompt_is_computed() -> None:
    assert run(TierSetup()).cached_tokens == 0


def test_main_memory() -> None:
    """The last step copies the 40 blocks back, and evicts as many for them less those that were unused."""
    simulated = run(HOST)
    assert simulated.cached_tokens == 640 and simulated.host_tokens > 500
    restored = simulated.host_tokens // 16
    evicted_before = 40 + 57 - 60
    moved = simulated.moved_blocks - evicted_before
    assert restored <= moved <= 2 * restored + 2
    assert simulated.measure("ttft")[2] == pytest.approx(COMPUTE_S + moved * BLOCK_BYTES / HOST_RATE)


def test_disk() -> None:
    """The prompt waits for the files of what was evicted, each read as a whole: 40 blocks are three of them."""
    simulated = run(DISK)
    assert simulated.cached_tokens == simulated.disk_tokens == 640
    assert simulated.disk_read_bytes == 40 * BLOCK_BYTES
    read_s = 40 * BLOCK_BYTES / DISK_RATE + 3 * FILE_S
    assert simulated.measure("queue")[2] == pytest.approx(read_s)
    assert simulated.measure("ttft")[2] == pytest.approx(read_s + COMPUTE_S)


def test_slow_disk() -> None:
    """Where computing is faster, nothing is read; and what it cannot take in time is left out."""
    slow = run(replace(DISK, disk_bandwidth=1e5))
    assert slow.slower_loads == 1 and slow.disk_tokens == 0
    full = run(replace(DISK, block_bytes=2.0**27))
    assert full.unwritten_blocks > 30


@pytest.mark.parametrize("tiers", [HOST, replace(DISK, disk_bandwidth=1e9)], ids=["host", "disk"])
def test_overload(tiers: TierSetup) -> None:
    """Conversations that return at once, each in most of the cache, wait: every prefix is copied back once."""
    count, tokens = 5, 640
    first = [Turn(10.0 * i, ((i, tokens),), 1, 100 + i) for i in range(count)]
    again = [Turn(100.0, ((i, tokens), (200 + i, 10)), 200, 300 + i) for i in range(count)]
    load = LoadPlan(trace=(*first, *again), requests=2 * count)
    tiers = replace(tiers, host_blocks=tiers.host_blocks and 300, disk_blocks=tiers.disk_blocks and 300)
    simulated = simulate(load, replace(SETUP, tiers=tiers), LinearCost())
    assert simulated.cached_tokens == count * tokens
    lower, blocks = simulated.host_tokens + simulated.disk_tokens, count * tokens // 16
    assert lower > (count - 2) * tokens
    assert simulated.disk_read_bytes == simulated.disk_tokens // 16 * BLOCK_BYTES
    assert simulated.moved_blocks < 4 * blocks  # out and in once, and what the answers evict


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200GB", (200e9, 7.0)), ("1.5TB,12GB/s", (1.5e12, 12e9)), ("64GiB,1 GB/s", (2**36, 1e9))],
)
def test_parse(text: str, expected: tuple[float, float]) -> None:
    assert parse_tier(text, "--disk-cache", 7.0) == expected


@pytest.mark.parametrize("text", ["", "much", "20GB,5GB", "20GB,fast/s"])
def test_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tier(text, "--disk-cache", 7.0)
