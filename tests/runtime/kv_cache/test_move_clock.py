"""The bytes of every move between tiers are counted, with the time that it took."""

from pathlib import Path

import torch

from localllm.formatting import format_moves
from localllm.llm.worker import tier_moves
from localllm.runtime.kv_cache.disk_folder import CacheFolder
from localllm.runtime.kv_cache.disk_tier import DiskTier
from localllm.runtime.kv_cache.sequence_state import CacheCopies
from localllm.runtime.kv_cache.tiers import CopyRun
from localllm.runtime.runner import MoveClock
from tests.models.families import FAMILIES
from tests.runtime.kv_cache.test_disk_tier import SIZE, identity, load, prompt_of
from tests.runtime.test_engine import run, sequence
from tests.tiny import make_checkpoint, make_engine


def test_moves_of_the_disk_tier(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3"]
    make_checkpoint(tmp_path / "model", kind, **changes)
    engine = make_engine(tmp_path / "model")
    tier = DiskTier(CacheFolder(tmp_path / "cache", 2**30), identity())
    tier.attach(engine.runner, engine.pool)
    assert not format_moves(tier_moves(engine))
    run(engine, [sequence(prompt_of(), max_tokens=1)])
    engine.close()
    moves, nbytes = tier_moves(engine), 200 // SIZE * engine.runner.block_bytes
    assert moves["device_to_host"].bytes == nbytes and moves["host_to_device"].bytes == 0
    assert moves["device_to_host"].seconds > 0
    assert nbytes < moves["host_to_disk"].bytes < 2 * nbytes + 20_000 and moves["host_to_disk"].seconds > 0
    again = make_engine(tmp_path / "model")
    other = DiskTier(CacheFolder(tmp_path / "cache", 2**30), identity())
    other.attach(again.runner, again.pool)
    assert load(other, [*prompt_of(), 7]) == 200
    loaded = tier_moves(again)
    assert loaded["host_to_device"].bytes == nbytes and loaded["host_to_device"].seconds > 0
    assert loaded["disk_to_host"].bytes == moves["host_to_disk"].bytes
    assert "host to device in" in format_moves(loaded) and "device to host" not in format_moves(loaded)
    other.close()


def test_moves_of_the_host_tier(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3"]
    make_checkpoint(tmp_path / "model", kind, **changes)
    runner = make_engine(tmp_path / "model").runner
    limit, size = runner.device_blocks, runner.block_bytes
    runs = (CopyRun(0, limit, 3), CopyRun(limit + 1, 4, 2), CopyRun(0, 1, 1))
    runner.apply_copies(CacheCopies(runs))
    moves = runner.move_clock.moves
    assert (moves["device_to_host"].bytes, moves["host_to_device"].bytes) == (3 * size, 2 * size)


def test_time_is_shared_by_bytes() -> None:
    clock = MoveClock(torch.device("cpu"))
    clock.add({"device_to_host": 30, "host_to_device": 10}, 4.0)
    clock.add({"device_to_host": 0, "host_to_device": 10}, 1.0)
    assert clock.moves == {"device_to_host": (30, 3.0), "host_to_device": (20, 2.0)}
