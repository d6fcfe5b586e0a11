"""Blocks that one process wrote to the disk have the same bits in another. All other files are ignored, and
answers are those of a computed prompt.
"""

import logging
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache import disk_tier
from localllm.runtime.kv_cache.disk_folder import CacheFolder
from localllm.runtime.kv_cache.disk_tier import DiskTier
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.kv_cache.snapshot import CacheIdentity, DamagedSnapshot, KVSnapshot, read_tokens
from tests.models.families import FAMILIES
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

SIZE = 8  # tokens of a block, so that a segment has 128
PROMPT_LEN = 205  # one segment, 9 blocks of the next, and 5 tokens
LIMIT = 2**30
KV_DTYPES = {"none": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def identity(name: str = "model", block_size: int = SIZE) -> CacheIdentity:
    return CacheIdentity(name, name, "float32", "float32", 24, block_size, 3, ("test",))


def attach(engine: Engine, folder: Path, *, limit: int = LIMIT, **options: bool) -> DiskTier:
    tier = DiskTier(CacheFolder(folder, limit), identity(), **options)
    tier.attach(engine.runner, engine.pool)
    return tier


def prompt_of(length: int = PROMPT_LEN, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def load(tier: DiskTier, token_ids: list[int], scope: str = "") -> int:
    """Load a prefix, and return how many tokens of it came from the disk."""
    loading = tier.pool.begin_load(token_ids, scope)
    deadline = time.monotonic() + 60
    while not loading.done:
        tier.install_loaded(wait_s=0.1)
        assert time.monotonic() < deadline
    return loading.tokens


def logits_behind_prefix(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Compute the logits behind the last token, from the longest cached prefix on."""
    state = SequenceState(engine.pool, token_ids)
    new = token_ids[state.length :]
    state.extend(len(new))
    batch = engine.runner.make_batch([state], [new], [len(new) - 1], engine.pool.drain_copies())
    logits = engine.runner.launch(batch)
    state.free()
    return logits


def continue_in_this_process(model: Path, folder: Path, kv_dtype: str) -> tuple[int, torch.Tensor]:
    """Return how many tokens were loaded from the disk, and the logits behind them."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        engine = make_engine(model, kv_dtype=KV_DTYPES[kv_dtype])
        tier = attach(engine, folder)
        loaded = load(tier, [*prompt_of(), 7])
        logits = logits_behind_prefix(engine, [*prompt_of(), 7])
        tier.close()
        return loaded, logits.clone()


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


@pytest.mark.quick_every(9)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_process_continues_with_the_same_bits(
    tmp_path: Path, other_process: ProcessPoolExecutor, family: str, kv_dtype: str
) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path / "model", kind, **changes)
    engine = make_engine(tmp_path / "model", kv_dtype=KV_DTYPES[kv_dtype])
    tier = attach(engine, tmp_path / "cache")
    run(engine, [sequence(prompt_of(), max_tokens=1)])
    expected = logits_behind_prefix(engine, [*prompt_of(), 7])
    engine.close()
    assert tier.counts.written_tokens == 200
    arguments = (tmp_path / "model", tmp_path / "cache", kv_dtype)
    loaded, logits = other_process.submit(continue_in_this_process, *arguments).result(timeout=120)
    assert loaded == 200
    assert torch.equal(logits, expected)


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, kind, **changes)
    return folder


def store(model: Path, folder: Path, prompts: list[list[int]]) -> None:
    """Compute prompts, and write them to the folder."""
    engine = make_engine(model, blocks=128)
    attach(engine, folder)
    run(engine, [sequence(prompt, max_tokens=1) for prompt in prompts])
    engine.close()


def answer(model: Path, folder: Path | None, prompt: list[int], scope: str = "") -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of its prompt came from the disk."""
    engine = make_engine(model)
    if folder:
        attach(engine, folder)
    asked = sequence(prompt)
    object.__setattr__(asked.request, "cache_scope", scope)
    answers = run(engine, [asked])
    engine.close()
    return tokens(answers[asked.request.id]), asked.disk_tokens


def test_a_prompt_is_found_after_a_restart(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, [prompt_of()])
    expected, _ = answer(model, None, prompt_of())
    assert answer(model, tmp_path, prompt_of()) == (expected, 200)


def test_a_prompt_that_begins_alike_takes_what_it_shares(tmp_path: Path, model: Path) -> None:
    store(model, tmp_path, [prompt_of(145)])
    other = [*prompt_of(140), *prompt_of(40, seed=1)]
    recurrent = make_engine(model).pool.recurrent
    expected, _ = answer(model, None, other)
    # A recurrent state exists at the end of the prompt's last block, 144, alone.
    assert answer(model, tmp_path, other) == (expected, 0 if recurrent else 136)


def test_no_other_api_key_finds_a_prompt(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, [prompt_of()])
    assert answer(model, tmp_path, prompt_of(), scope="key")[1] == 0
    assert answer(model, tmp_path, prompt_of(), scope="key")[1] == 200  # it has its own now
    engine = make_engine(model)
    first, second = sequence(prompt_of()), sequence(prompt_of())
    object.__setattr__(second.request, "cache_scope", "key")
    run(engine, [first])
    run(engine, [second])
    assert second.cached_tokens == 0  # in memory neither


def test_sequences_that_evict_each_other_are_found(model: Path, tmp_path: Path) -> None:
    """Four conversations with a common beginning take turns in a cache for one and a half."""
    engine = make_engine(model, blocks=40)
    tier = attach(engine, tmp_path)
    texts = [[*prompt_of(45), *prompt_of(150, seed)] for seed in range(1, 5)]
    expected = [answer(model, None, text)[0] for text in texts]
    for turn in range(3):
        for index, text in enumerate(texts):
            asked = sequence(text)
            assert tokens(run(engine, [asked])[asked.request.id]) == expected[index]
            while tier.pending:
                time.sleep(0.001)
            if turn:
                assert asked.cached_tokens == 192
    assert tier.counts.loaded_tokens > 0
    engine.pool.check_invariants()
    engine.close()


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("seed", range(9))
def test_any_mix_has_the_answers_without_a_disk(model: Path, tmp_path: Path, seed: int) -> None:
    """Prompts with shared beginnings arrive at random, in a cache that is too small."""
    rng = random.Random(seed)
    stems = [prompt_of(rng.randrange(1, 160), seed=s) for s in range(3)]
    prompts = [[*rng.choice(stems), *prompt_of(rng.randrange(1, 60), seed=s)] for s in range(12)]
    expected = [answer(model, None, prompt)[0] for prompt in prompts]
    engine = make_engine(model, blocks=rng.choice((60, 90)), aside=rng.choice((0, 20)), token_budget=64)
    tier = attach(engine, tmp_path)
    for _ in range(3):
        order = rng.sample(range(len(prompts)), len(prompts))
        asked = {index: sequence(prompts[index]) for index in order}
        answers = run(engine, list(asked.values()))
        for index, each in asked.items():
            assert tokens(answers[each.request.id]) == expected[index]
        engine.pool.check_invariants()
    engine.close()
    assert not tier.loads
    for file in tmp_path.glob("*.safetensors"):
        KVSnapshot.parse(bytearray(file.read_bytes()))


def test_only_what_is_kept_is_written_where_nothing_else_may_be(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model)
    tier = attach(engine, tmp_path, writes_evicted=False)
    kept = sequence(prompt_of())
    object.__setattr__(kept.request, "keep", True)
    run(engine, [sequence(prompt_of(seed=1)), kept])
    engine.close()
    assert tier.counts.written_tokens == 208  # the prompt, and the answer's first three tokens
    assert answer(model, tmp_path, prompt_of())[1] == 200
    assert answer(model, tmp_path, prompt_of(seed=1))[1] == 0


def test_a_longer_conversation_replaces_its_shorter_end(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, [prompt_of(40)])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    store(model, tmp_path, [prompt_of(90)])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    store(model, tmp_path, [prompt_of(60)])  # part of it
    assert len(list(tmp_path.glob("*.safetensors"))) == (2 if make_engine(model).pool.recurrent else 1)
    assert answer(model, tmp_path, prompt_of(90))[1] == 88


def mutate(content: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(content)), rng.randrange(1, 40)
    match rng.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content + rng.randbytes(length)
        case 2:
            return content[:at] + rng.randbytes(length) + content[at:]
        case 3:
            return content[:at] + content[at + length :]
        case 4:
            at = rng.randrange(min(len(content), 600))  # the header
            return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
        case _:
            return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_are_ignored(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    rng, prompt = random.Random(count), prompt_of(125)
    make_checkpoint(tmp_path / "model", "Qwen3", **FAMILIES["Qwen3"][1])
    store(tmp_path / "model", tmp_path / "cache", [prompt])
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    content = file.read_bytes()
    engine = make_engine(tmp_path / "model")
    expected, _ = answer(tmp_path / "model", None, prompt)
    for index in range(count):
        mutated = mutate(content, rng)
        with pytest.raises(DamagedSnapshot):
            KVSnapshot.parse(bytearray(mutated))
        file.write_bytes(mutated)
        with suppress(DamagedSnapshot):  # and nothing else
            read_tokens(file)
        tier = attach(engine, tmp_path / "cache", writes_evicted=False)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load(tier, prompt) == 0
            assert load(tier, prompt) == 0
        assert len(caplog.records) <= 1
        if index % 50 == 0:
            asked = sequence(prompt)
            assert tokens(run(engine, [asked])[asked.request.id]) == expected
            engine.reset()
        tier.close()
    file.write_bytes(content)
    assert answer(tmp_path / "model", tmp_path / "cache", prompt)[1] == 120


def test_a_damaged_file_is_written_again(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, [prompt_of(90)])
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert answer(model, tmp_path, prompt_of(90))[1] == 0
    assert answer(model, tmp_path, prompt_of(90))[1] == 88


def test_a_file_of_other_tokens_under_the_right_name_is_ignored(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path / "a", [prompt_of(90)])
    store(model, tmp_path / "b", [prompt_of(90, seed=1)])
    (mine,), (other,) = ((tmp_path / name).glob("*.safetensors") for name in "ab")
    expected, _ = answer(model, None, prompt_of(90))
    mine.write_bytes(other.read_bytes())
    assert answer(model, tmp_path / "a", prompt_of(90)) == (expected, 0)


def test_a_cache_of_another_model_is_not_used(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, [prompt_of(90)])
    engine = make_engine(model)
    tier = DiskTier(CacheFolder(tmp_path, LIMIT), identity("another"))
    tier.attach(engine.runner, engine.pool)
    assert load(tier, prompt_of(90)) == 0
    tier.close()


def test_what_is_faster_to_compute_is_not_read(model: Path, tmp_path: Path) -> None:
    store(model, tmp_path, [prompt_of()])
    engine = make_engine(model)
    tier = attach(engine, tmp_path)
    tier.record_prefill(1000, 1e-3)
    tier.read_bytes_per_s = 1e6
    assert load(tier, prompt_of()) == 0 and tier.counts.slower_loads == 1
    tier.read_bytes_per_s = 1e12
    tier.record_prefill(1000, 1e6)
    assert load(tier, prompt_of()) == 200
    tier.close()


def test_a_disk_that_is_too_slow_is_skipped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "MAX_BACKLOG_BYTES", -1)
    engine = make_engine(model)
    tier = attach(engine, tmp_path)
    run(engine, [sequence(prompt_of())])
    engine.close()
    assert tier.counts.skipped_segments > 0 and tier.counts.written_files == 0
