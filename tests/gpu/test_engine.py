"""The engine on a GPU: replayed graphs match single launches, and no sequence depends on its batch, bit by bit
where the same kernels compute it."""

import statistics

import pytest
import torch

from localllm.benchmark.gpu.decode_steps import Model, fill_prefix_cache, generate, random_prompt
from localllm.benchmark.gpu.generated import SHAPES, Form
from tests.gpu.steps import drawn, greedy, run

CONTEXT = 65  # tokens, of which all but one are found in the cache: no step has a prompt to compute
ANSWER = 40
# Numbers of sequences, whose steps have up to 16 rows: the kernels of a single row multiply them, so that each has
# the bits that it has alone. More rows have other kernels, which add in another order.
SAME_BITS = (1, 3, 8, 12, 16)
MORE = 32
NEAR, FAR = 0.05, 0.5  # mean and largest difference of log probabilities: bfloat16 rounds logits to 1/32


@pytest.fixture(scope="module", params=["bf16", "int8", "int4"])
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


@pytest.fixture(scope="module")
def model(form: Form) -> Model:
    with torch.inference_mode():
        made = generate(SHAPES["1B"], form, torch.device("cuda", 0), CONTEXT, sequences=40)
        for seed in range(32):
            fill_prefix_cache(made, random_prompt(made, CONTEXT, seed))
        return made


def test_graphs_match_single_launches(model: Model) -> None:
    runner = model.engine.runner
    assert runner.graphs is not None, runner.no_graphs_reason

    def answers(count: int) -> list[list[tuple[int, float]]]:
        prompts = [random_prompt(model, CONTEXT, seed) for seed in range(count)]
        return run(
            model.engine,
            [drawn(p, ANSWER, i) if i % 3 == 2 else greedy(p, ANSWER) for i, p in enumerate(prompts)],
        )

    for count in SAME_BITS:
        replayed = answers(count)
        kept, runner.graphs = runner.graphs, None
        try:
            assert answers(count) == replayed
        finally:
            runner.graphs = kept


def test_answers_do_not_depend_on_the_batch(model: Model) -> None:
    """Sequences end at different times, so that every batch size occurs."""
    prompts = [random_prompt(model, CONTEXT, seed) for seed in range(MORE)]
    alone = [run(model.engine, [greedy(prompt, 10 + i)])[0] for i, prompt in enumerate(prompts)]
    for count in SAME_BITS:
        together = run(model.engine, [greedy(p, 10 + i) for i, p in enumerate(prompts[:count])])
        assert together == alone[:count]
    together = run(model.engine, [greedy(p, 10 + i) for i, p in enumerate(prompts)])
    differences = list[float]()
    for answer, expected in zip(together, alone, strict=True):
        # Until another token is sampled, after which the answers are not the same question.
        for (token, logprob), (expected_token, expected_logprob) in zip(answer, expected, strict=True):
            differences.append(abs(logprob - expected_logprob))
            if token != expected_token:
                break
    assert statistics.mean(differences) < NEAR
    assert max(differences) < FAR


def test_an_answer_is_the_same_each_time(model: Model) -> None:
    prompts = [random_prompt(model, CONTEXT, seed) for seed in range(8)]
    first = run(model.engine, [greedy(p, ANSWER) for p in prompts])
    for _ in range(5):
        assert run(model.engine, [greedy(p, ANSWER) for p in prompts]) == first
