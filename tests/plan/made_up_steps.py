"""Recorded steps of a model whose durations are known."""

import random
from collections.abc import Sequence

import pytest

from localllm.checkpoint.header import read_header
from localllm.hub.resolve import resolve_model
from localllm.plan import step_times
from localllm.plan.expected import step_setup
from localllm.plan.fit import LoadOptions
from localllm.settings import Settings


def record_steps(
    model: str,
    *,
    batches: Sequence[int] = range(1, 9),
    noise: float = 0.0,
    kv_dtype: str = "auto",
) -> None:
    """Record 400 steps of a model on this machine: 2 ms, 1 ms more for each sequence and 0.1 ms for each prompt
    token, times a log-normal factor with the standard deviation `noise`.

    batches: numbers of sequences, which occur equally often
    """
    settings = Settings.from_environment()
    options = LoadOptions(None, 1, None, "auto", kv_dtype)
    setup, _ = step_setup(read_header(resolve_model(model).path), options, "auto", settings, name=model)
    rng, rows = random.Random(0), list[step_times.StepTime]()
    for _ in range(400):
        sequences, prompt = rng.choice(batches), rng.choice((0, 0, 0, 0, 50, 200))
        context = sequences * rng.randint(50, 900)
        seconds = (0.002 + 0.001 * sequences + 0.0001 * prompt) * rng.lognormvariate(0, noise)
        rows.append(
            (sequences, sequences, context, int(prompt > 0), prompt, prompt, prompt * prompt // 2, seconds)
        )
    settings.home.mkdir(parents=True, exist_ok=True)
    step_times.record(settings.home, setup, rows, pytest.fail)
