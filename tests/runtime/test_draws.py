"""Draws on the device against `sampler.sample`, under Triton's interpreter: same tokens over random logits and
parameters, whatever way they take, with tokens that the host does not know."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime import draws
from localllm.runtime.draws import Draws, Histories, Kind, kind_of
from localllm.runtime.kernels.gpu import sampling
from localllm.runtime.sampler import NO_NUMBER, NOTHING_LEFT, Row, sample

pytestmark = pytest.mark.usefixtures("interpreter")
VOCABULARY, CONTEXT = 211, 64
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and lists that hold few rows' tokens."""
    monkeypatch.setattr(sampling, "CHUNK", 64)
    monkeypatch.setattr(sampling, "CANDIDATES", 16)
    monkeypatch.setattr(sampling, "BLOCK", 128)
    monkeypatch.setattr(draws, "MOST_BIASES", 4)


def row(
    position: int = 0, seed: int = 1, prompt: list[int] | None = None, said: list[int] | None = None, **params: Any
) -> Row:
    said = said or []
    return Row(SamplingParams(**params), seed, position, [*(prompt or []), *said], Counter(said))


def logits(rows: int, seed: int = 0, spread: float = 3.0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def make(bucket: int, vocabulary: int = VOCABULARY) -> Draws:
    return Draws(bucket, vocabulary, CPU, Histories(bucket, CONTEXT, vocabulary, CPU))


def on_device(values: Tensor, rows: list[Row], bucket: int | None = None) -> list[int]:
    """One step of new draws; the bucket's further rows hold what must not be read."""
    bucket = bucket or len(rows)
    padded = torch.full((bucket, values.shape[1]), torch.nan)
    padded[: len(rows)] = values
    choices = torch.full((bucket,), -77)
    made = make(bucket, values.shape[1])
    made.set(rows)
    made.launch(kind_of(rows, values.shape[1]), padded, choices)
    assert choices[len(rows) :].eq(-77).all()
    return choices[: len(rows)].tolist()


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.6},
    {"temperature": 1e-5},
    {"temperature": 1000},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 16},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1e-4},
    {"min_p": 1},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.97},
    {"temperature": 3, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1000, "top_k": 50, "top_p": 0.5},
]


@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
def test_rows_get_the_tokens_of_the_reference(spread: float) -> None:
    for seed in range(3):
        rows = [row(position=7 * seed, seed=seed + i, **params) for i, params in enumerate(FILTERS)]
        values = logits(len(rows), seed, spread)
        assert on_device(values, rows) == sample(values.clone(), rows).tolist()
