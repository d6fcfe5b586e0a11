"""A kernel that is started while the one before it still runs must not read what that one has yet to write. Such a
race is silent: the buffer holds the numbers of the last replay, which look right.

So between replays all memory that a graph computes in is filled with NaN; sequences with different contexts take
turns, so that what the last replay left is wrong for this one; and other kernels get in the way on another stream,
so that the order in which a GPU's multiprocessors come free changes. Answers must stay the same bit by bit.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from localllm.benchmark.gpu.decode_steps import Model, fill_prefix_cache, generate, random_prompt
from localllm.benchmark.gpu.generated import SHAPES, Form
from tests.gpu.graph_memory import poison
from tests.gpu.steps import greedy, run

CONTEXTS = (17, 513, 1025)  # tokens
ANSWER = 24
ROUNDS = 12
SIZES = (256, 1024, 3072)  # of products that get in the way


@pytest.fixture(scope="module", params=["bf16", "int8", "int4"])
def model(request: pytest.FixtureRequest) -> Model:
    form: Form = request.param
    shape = SHAPES["8B"] | {"num_hidden_layers": 6}
    with torch.inference_mode():
        made = generate(shape, form, torch.device("cuda", 0), max(CONTEXTS), sequences=12)
        for context in CONTEXTS:
            for seed in range(3):
                fill_prefix_cache(made, random_prompt(made, context, seed))
        return made


def answers(model: Model, context: int, batch: int) -> list[list[tuple[int, float]]]:
    return run(model.engine, [greedy(random_prompt(model, context, seed), ANSWER) for seed in range(batch)])


@contextmanager
def poisoned(model: Model) -> Iterator[list[int]]:
    """Overwrite the free memory of the graphs before each step; yield the numbers of bytes."""
    runner = model.engine.runner
    assert runner.graphs is not None, runner.no_graphs_reason
    plain, counts = runner.run, []

    def run_poisoned(step):
        counts.append(poison(runner.graphs.memory_pool, runner.device))
        return plain(step)

    runner.run = run_poisoned
    try:
        yield counts
    finally:
        del runner.run


@contextmanager
def crowded(device: torch.device, seed: int) -> Iterator[None]:
    """Products of random sizes on another stream."""
    rng, aside = random.Random(seed), torch.cuda.Stream(device)
    squares = [torch.randn(size, size, device=device, dtype=torch.bfloat16) for size in SIZES]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(200):
            square = rng.choice(squares)
            torch.mm(square, square)
    yield
    aside.synchronize()


@pytest.mark.parametrize("batch", [1, 3])
def test_no_kernel_reads_before_another_has_written(model: Model, batch: int, device: torch.device) -> None:
    graphs, runner = model.engine.runner.graphs, model.engine.runner
    runner.graphs = None
    expected = {context: answers(model, context, batch) for context in CONTEXTS}
    runner.graphs = graphs
    for context in CONTEXTS:  # captures
        assert answers(model, context, batch) == expected[context]
    for turn in range(ROUNDS):
        with poisoned(model) as counts, crowded(device, turn):
            for context in CONTEXTS:
                assert answers(model, context, batch) == expected[context], f"in turn {turn}"
        assert max(counts) > 0, "no memory of a graph was found to poison"
