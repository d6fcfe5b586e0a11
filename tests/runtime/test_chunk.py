"""A chunk is as large as readers have patience for, whatever the machine, and finds back when it is fast again."""

from collections.abc import Callable

import pytest

from localllm.runtime.chunk import LEAST, Chunk


def settle(chunk: Chunk, took: Callable[[int], float], steps: int = 40) -> int:
    for _ in range(steps):
        size = chunk.budget()
        chunk.stepped(size, took(size))
    return chunk.budget()


def test_nothing_is_made_smaller_before_it_was_slow() -> None:
    assert Chunk(512).budget() == 512
    assert settle(Chunk(512), lambda size: 1e-4 * size) == 512


@pytest.mark.parametrize(("fixed", "each", "size"), [(0.16, 1.9e-3, 64), (0.09, 2e-3, 128), (0.1, 1e-3, 256)])
def test_the_largest_that_is_fast_enough_is_found(fixed: float, each: float, size: int) -> None:
    assert settle(Chunk(512), lambda tokens: fixed + each * tokens) == size


def test_it_never_becomes_so_small_that_prompts_do_not_advance() -> None:
    assert settle(Chunk(512), lambda size: 10.0) == LEAST
    assert settle(Chunk(48), lambda size: 10.0) == 48


def test_a_step_that_was_disturbed_changes_little() -> None:
    chunk = Chunk(512)
    settle(chunk, lambda size: 0.1)
    chunk.stepped(512, 8.0)
    assert chunk.budget() == 512


def test_it_grows_again_when_steps_are_fast_again() -> None:
    chunk = Chunk(512)
    assert settle(chunk, lambda size: 4e-3 * size) == 64
    assert settle(chunk, lambda size: 1e-4 * size) == 512
