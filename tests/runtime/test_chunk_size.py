"""Chunk sizes keep gaps between tokens even on any machine, and grow again when it is fast again."""

from collections.abc import Callable

import pytest

from localllm.runtime.scheduler import MAX_SLOWDOWN, MIN_CHUNK_TOKENS, ChunkPolicy


def settle(chunk: ChunkPolicy, took: Callable[[int], float], steps: int = 40) -> int:
    """Return the chunk length after many steps. took: seconds of a step by number of prompt tokens."""
    for _ in range(steps):
        chunk.record_step(0, took(0))
        size = chunk.chunk_len(streaming=True)
        chunk.record_step(size, took(size))
    return chunk.chunk_len(streaming=True)


def test_chunks_shrink_only_after_slow_steps() -> None:
    assert ChunkPolicy(512).chunk_len(streaming=True) == 512
    assert settle(ChunkPolicy(512), lambda size: 1e-3 + 1e-5 * size) == 512


@pytest.mark.parametrize(("alone", "each"), [(0.01, 1e-4), (0.1, 1e-3), (0.02, 1e-4)])
def test_a_step_with_a_chunk_takes_hardly_longer_than_one_without(alone: float, each: float) -> None:
    size = settle(ChunkPolicy(512), lambda tokens: alone + each * tokens)
    assert alone + each * size == pytest.approx(MAX_SLOWDOWN * alone, abs=each)


def test_very_fast_answers_may_be_uneven() -> None:
    assert settle(ChunkPolicy(512), lambda tokens: 1e-3 + 5e-5 * tokens) == pytest.approx(180, abs=1)


def test_without_streams_a_chunk_takes_the_full_budget() -> None:
    chunk = ChunkPolicy(512)
    settle(chunk, lambda tokens: 0.1 + 2e-3 * tokens)
    assert chunk.chunk_len(streaming=False) == pytest.approx(150, abs=1)
    chunk.prefer_throughput()
    assert chunk.chunk_len(streaming=False) == chunk.chunk_len(streaming=True) == 512


def test_it_never_becomes_so_small_that_prompts_do_not_advance() -> None:
    assert settle(ChunkPolicy(512), lambda size: 1.0 + size) == MIN_CHUNK_TOKENS
    assert settle(ChunkPolicy(48), lambda size: 1.0 + size) == 48


def test_a_step_that_was_disturbed_changes_little() -> None:
    chunk = ChunkPolicy(512)
    size = settle(chunk, lambda size: 0.1 + 1e-3 * size)
    chunk.record_step(0, 8.0)
    chunk.record_step(size, 8.0)
    assert chunk.chunk_len(streaming=True) == size


def test_it_grows_again_when_steps_are_fast_again() -> None:
    chunk = ChunkPolicy(512)
    assert settle(chunk, lambda size: 0.01 + 4e-3 * size) == MIN_CHUNK_TOKENS
    assert settle(chunk, lambda size: 0.01 + 1e-5 * size) == 512
