"""What several processes have computed is stored, and used again by as many, or by any number of stages."""

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache import disk_folder
from localllm.runtime.kv_cache.disk_tier import DiskTier
from localllm.runtime.kv_cache.snapshot import KVSnapshot
from tests.models.families import FAMILIES
from tests.parallel.ranks_in_threads import DIVISIONS, RanksInThreads
from tests.parallel.test_shards import REFUSED
from tests.runtime.kv_cache.test_disk_tier import attach, load, logits_behind_prefix, prompt_of
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

PROMPT = prompt_of()  # one segment of 128 tokens, and 9 blocks


@contextmanager
def dividing(model: Path, division: str, folder: Path) -> Iterator[tuple[Engine, DiskTier]]:
    """Yield an engine of several ranks, which stores its prefixes when it is closed."""
    with torch.inference_mode(), RanksInThreads(model, **DIVISIONS[division]) as ranks:
        tier = attach(ranks.engine, folder)
        yield ranks.engine, tier
        ranks.engine.close()
        ranks.engine.pool.check_invariants()


def checkpoint(folder: Path, family: str) -> Path:
    kind, changes = FAMILIES[family]
    make_checkpoint(folder / "model", kind, **changes)
    return folder / "model"


@pytest.mark.quick_every(25)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_others_continue_with_the_same_bits(tmp_path: Path, family: str, division: str) -> None:
    if family in REFUSED and DIVISIONS[division]["size"] > 1:
        pytest.skip("is not divided")
    model = checkpoint(tmp_path, family)
    with dividing(model, division, tmp_path / "cache") as (engine, tier):
        run(engine, [sequence(PROMPT, max_tokens=1)])
        expected = logits_behind_prefix(engine, [*PROMPT, 7])
    assert tier.counts.written_tokens == 200
    with dividing(model, division, tmp_path / "cache") as (engine, tier):
        assert load(tier, [*PROMPT, 7]) == 200
        assert torch.equal(logits_behind_prefix(engine, [*PROMPT, 7]), expected)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3", "DeepSeek-V3", "Gemma 4, like E2B", "LFM2"])
def test_stages_and_one_process_continue_each_other(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family)
    prompt = [*PROMPT, 7]

    def continue_in(engine: Engine, tier: DiskTier) -> torch.Tensor:
        assert load(tier, prompt) == 200
        return logits_behind_prefix(engine, prompt)

    with torch.inference_mode():
        alone = make_engine(model)
        attach(alone, tmp_path / "alone")
        run(alone, [sequence(PROMPT, max_tokens=1)])
        expected = logits_behind_prefix(alone, prompt)
        alone.close()
        with dividing(model, "two stages", tmp_path / "alone") as stages:
            assert torch.equal(continue_in(*stages), expected)
        with dividing(model, "two stages", tmp_path / "stages") as (engine, _):
            run(engine, [sequence(PROMPT, max_tokens=1)])
        again = make_engine(model)
        assert torch.equal(continue_in(again, attach(again, tmp_path / "stages")), expected)
        again.close()


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3"])
def test_sequences_that_evict_each_other_have_their_tokens(
    tmp_path: Path, family: str, division: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four conversations with a common beginning take turns in a cache for one and a half."""
    # So that reading is worthwhile, however fast this machine computes.
    monkeypatch.setattr(DiskTier, "record_prefill", lambda *_: None)
    model = checkpoint(tmp_path, family)
    texts = [[*prompt_of(45), *prompt_of(150, seed)] for seed in range(1, 5)]

    def ask(engine: Engine, text: list[int]) -> tuple[list[int], int]:
        asked = sequence(text)
        return tokens(run(engine, [asked])[asked.request.id]), asked.disk_tokens

    with torch.inference_mode(), RanksInThreads(model, **DIVISIONS[division]) as ranks:
        expected = [ask(ranks.engine, text)[0] for text in texts]
    with torch.inference_mode(), RanksInThreads(model, **DIVISIONS[division], blocks=40) as ranks:
        tier = attach(ranks.engine, tmp_path / "cache")
        loaded = 0
        for _ in range(3):
            for text, answer in zip(texts, expected, strict=True):
                found, from_disk = ask(ranks.engine, text)
                assert found == answer
                loaded += from_disk
                while tier.pending:  # what was evicted is read back once it has been written
                    time.sleep(0.01)
        ranks.engine.close()
        ranks.engine.pool.check_invariants()
    assert loaded > 0 and not tier.loads


@pytest.mark.parametrize("rank", range(2))
def test_a_file_that_is_damaged_in_the_part_of_one_rank_is_not_used(tmp_path: Path, rank: int) -> None:
    model, prompt = checkpoint(tmp_path, "Qwen3"), prompt_of(90)
    with dividing(model, "two ranks", tmp_path / "cache") as (engine, _):
        asked = sequence(prompt)
        expected = tokens(run(engine, [asked])[asked.request.id])
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    part = KVSnapshot.parse(content).parts[f"1.0.{rank}"]
    part.data[random.Random(0).randrange(part.nbytes)] ^= 1  # type: ignore[index]
    file.write_bytes(content)
    with dividing(model, "two ranks", tmp_path / "cache") as (engine, tier):
        asked = sequence(prompt)
        assert tokens(run(engine, [asked])[asked.request.id]) == expected
        assert asked.disk_tokens == 0
    with dividing(model, "two ranks", tmp_path / "cache") as (_, tier):  # it has been written again
        assert load(tier, prompt) == 88


def test_a_disk_that_is_full_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_folder.os, "fsync", full)
    model, answers = checkpoint(tmp_path, "Qwen3"), list[list[int]]()
    for _ in range(2):
        with dividing(model, "two ranks", tmp_path / "cache") as (engine, tier):
            asked = sequence(PROMPT)
            answers.append(tokens(run(engine, [asked])[asked.request.id]))
        assert not tier.counts.written_files
    assert answers[0] == answers[1]
    messages = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert messages == [os.strerror(errno.ENOSPC)] * 2
