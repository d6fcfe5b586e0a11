"""Sampling on the device, under Triton's interpreter, draws the tokens of `sampler.sample`, for random logits and
parameters and for tokens that the host does not know."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime import gpu_sampler
from localllm.runtime.gpu_sampler import BucketSampler, GpuSampler, SamplingVariant, TokenHistories, variant_of
from localllm.runtime.kernels.gpu import sampling
from localllm.runtime.sampler import ALL_FORBIDDEN, NOT_FINITE, SamplingSpec, sample

pytestmark = pytest.mark.usefixtures("interpreter")
VOCABULARY, CONTEXT = 211, 40
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several chunks per row, and lists that hold the tokens of only some rows."""
    monkeypatch.setattr(sampling, "CHUNK_TOKENS", 128)
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 16)
    monkeypatch.setattr(sampling, "SEARCH_BLOCK", 128)
    monkeypatch.setattr(sampling, "HISTORY_BLOCK", 32)
    monkeypatch.setattr(gpu_sampler, "MAX_BIASES", 4)


def row(
    position: int = 0, seed: int = 1, prompt: tuple[int, ...] = (), history: int = -1, **params: Any
) -> SamplingSpec:
    return SamplingSpec(SamplingParams(**params), seed, position, list(prompt), Counter(), history)


def logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def on_device(values: Tensor, rows: list[SamplingSpec], bucket: int = 0) -> list[int]:
    """Sample one step on the device; unused rows of the bucket contain NaN, which must not be read."""
    bucket, vocabulary = bucket or len(rows), values.shape[1]
    padded = torch.full((bucket, vocabulary), torch.nan)
    padded[: len(rows)] = values
    choices = torch.full((bucket,), -77)
    made = BucketSampler(bucket, vocabulary, CPU, TokenHistories(bucket, CONTEXT, vocabulary, CPU))
    made.prepare(rows)
    made.launch(variant_of(rows, vocabulary), padded, choices)
    assert choices[len(rows) :].eq(-77).all()
    return choices[: len(rows)].tolist()


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 1e-5},
    {"temperature": 1000},
    {"top_k": 1},
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
    {"temperature": 1000, "top_k": 50, "top_p": 0.5},
]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.3, 3])
def test_rows_get_the_tokens_of_the_reference(spread: float) -> None:
    rows = [row(position=7 * i, seed=2**62 + i, **params) for i, params in enumerate(PARAMS)]
    values = logits(len(rows), int(spread)) * spread / 2
    assert on_device(values, rows) == sample(values.clone(), rows).tolist()


def test_ties_are_kept_or_dropped_together() -> None:
    """A model that computes in bfloat16 has such logits."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 3}, {"top_k": 30}, {"top_p": 0.6}, {"min_p": 0.3}]
    rows = [row(position=i, **params) for i, params in enumerate(kinds)]
    values = (logits(len(rows)).bfloat16() + 50).float()
    assert on_device(values, rows) == sample(values.clone(), rows).tolist()
    flat = torch.zeros_like(values)
    assert on_device(flat, rows) == sample(flat.clone(), rows).tolist()


def test_a_row_draws_the_same_in_any_batch_and_bucket() -> None:
    rows = [row(position=i, seed=i, **PARAMS[i]) for i in (0, 1, 6, 9)]
    values = logits(len(rows))
    together = on_device(values, rows, bucket=6)
    assert together == [on_device(values[i : i + 1], [row])[0] for i, row in enumerate(rows)]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_invalid_tokens_are_reported(temperature: float) -> None:
    values = logits(5)
    values[0, 150], values[1, 3], values[2], values[3, :200] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rows = [row(position=i, temperature=temperature, top_p=0.9) for i in range(5)]
    choices = on_device(values, rows)
    assert choices[:3] == [NOT_FINITE, NOT_FINITE, ALL_FORBIDDEN]
    assert choices[3:] == sample(values.clone(), rows).tolist()[3:]
    assert choices[3] >= 200


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """Chi-square with 3 degrees of freedom, whose 99.9th percentile is 16.3."""
    values, count = torch.tensor([1.0, 0.5, 0.0, 1.5]), 60
    rows = [row(position=i, seed=9) for i in range(count)]
    drawn = torch.tensor(on_device(values.expand(count, -1), rows))
    expected = values.softmax(-1) * count
    assert ((torch.bincount(drawn, minlength=4) - expected) ** 2 / expected).sum() < 16.3


PENALTIES: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0, "repetition_penalty": 3, "repeat_last_n": 3},
    {"repetition_penalty": 2, "repeat_last_n": 0},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": -0.2},
    {"top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {3: 2.5, 150: -torch.inf}},
    {"temperature": 0, "logit_bias": {7: 100}},
    {"top_k": 9},
]


def test_penalties_count_tokens_that_only_the_device_knows() -> None:
    """The host receives each token one step late, as in the engine; then the order of sequences changes, and some
    end.
    """
    prompts = [((5, 6, 6, 200 - i) * (i + 1))[:30] for i in range(len(PENALTIES))]
    order = [3, 0, 5, 1, 2, 4, 7, 6]  # rows of the history
    known = [row(len(prompts[i]), i, prompts[i], history=order[i], **p) for i, p in enumerate(PENALTIES)]
    exact = [row(len(prompts[i]), i, prompts[i], **p) for i, p in enumerate(PENALTIES)]
    histories = TokenHistories(8, CONTEXT, VOCABULARY, CPU)
    buckets = {8: BucketSampler(8, VOCABULARY, CPU, histories), 6: BucketSampler(6, VOCABULARY, CPU, histories)}
    shapes = logits(8, 4) / 3  # near enough that penalties decide
    places = list(range(8))
    unread: dict[int, int] = {}
    for step in range(6):
        if step == 3:
            places = [4, 1, 0, 3, 5]
        made = buckets[8 if step < 3 else 6]
        rows = [known[i] for i in places]
        made.prepare(rows)
        choices = torch.zeros(len(rows), dtype=torch.int64)
        made.launch(variant_of(rows, VOCABULARY), shapes[places], choices)
        expected = sample(shapes[places], [exact[i] for i in places]).tolist()
        assert choices.tolist() == expected
        for i, token in unread.items():
            told(known[i], token)
        unread = dict(zip(places, expected, strict=True))
        for i, token in unread.items():
            told(exact[i], token)
            exact[i], known[i] = (replace(r, position=r.position + 1) for r in (exact[i], known[i]))
    assert not histories.on_device.marks.any()


def told(row: SamplingSpec, token: int) -> None:
    assert isinstance(row.token_ids, list)
    row.token_ids.append(token)
    row.output_counts[token] += 1


def test_a_step_of_the_same_rows_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(4, prompt=(1, 2, 3, 4), history=0, repetition_penalty=1.1), row(9)]
    made = BucketSampler(2, VOCABULARY, CPU, TokenHistories(2, CONTEXT, VOCABULARY, CPU))
    filled: list[Tensor] = []
    copy = gpu_sampler.upload_into
    monkeypatch.setattr(
        gpu_sampler, "upload_into", lambda target, values: (filled.append(values), copy(target, values))
    )
    made.prepare(rows)
    assert len(filled) == 2  # a history, and the columns
    made.launch(variant_of(rows, VOCABULARY), logits(2), torch.zeros(2, dtype=torch.int64))
    made.prepare([replace(r, position=r.position + 1) for r in rows])
    assert len(filled) == 2
    assert made.columns.position.tolist() == [5, 10]
    made.prepare([replace(r, position=r.position + 1) for r in rows])  # drawn once more
    assert len(filled) == 3


def test_a_kind_says_which_kernels_a_step_takes_or_why_none() -> None:
    assert variant_of([row(temperature=0), row(temperature=0)], VOCABULARY) == SamplingVariant(
        is_random=False, has_penalties=False
    )
    assert variant_of([row(temperature=0), row()], VOCABULARY) == SamplingVariant(
        is_random=True, has_penalties=False
    )
    assert variant_of([row(temperature=0, presence_penalty=1)], VOCABULARY) == SamplingVariant(
        is_random=False, has_penalties=True
    )
    assert variant_of([row(logit_bias=dict.fromkeys(range(5), 1))], VOCABULARY).unsupported_reason
    assert variant_of([row()], 2**20).unsupported_reason


def test_end_tokens_are_forbidden_until_min_tokens_without_new_parameters() -> None:
    """Runs one bucket for six steps: the bias of the end tokens begins and ends, combined with a logit_bias."""
    values = logits(2)
    values[:, [7, 150]] += 20
    sampler_of = BucketSampler(2, VOCABULARY, CPU, TokenHistories(2, CONTEXT, VOCABULARY, CPU))
    rows = [row(seed=5, min_tokens=4), row(seed=6, logit_bias={3: 2.5, 7: 50})]
    got, expected = [], []
    for position in range(6):
        ends = (7, 150, VOCABULARY + 1) if position < 4 else ()
        rows = [replace(rows[0], position=position, forbidden_ids=ends), replace(rows[1], position=position)]
        choices, scores = torch.zeros(2, dtype=torch.int64), values.clone()
        sampler_of.prepare(rows)
        sampler_of.launch(SamplingVariant(is_random=True, has_penalties=True), scores, choices)
        got.append(choices.tolist())
        expected.append(sample(values.clone(), rows).tolist())
    assert got == expected
    assert [first in (7, 150) for first, _ in got] == [False] * 4 + [True] * 2


def test_too_many_end_tokens_are_declined_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampler, "RESERVED_END_TOKENS", 2)
    assert not variant_of([row(min_tokens=1, stop_ids=(1, 2))], VOCABULARY).unsupported_reason
    many = variant_of([row(min_tokens=1, stop_ids=(1, 2, 3))], VOCABULARY).unsupported_reason
    assert many == "logit_bias and stop_ids name more than 2 tokens"
    ends = variant_of([replace(row(min_tokens=1), forbidden_ids=(1, 2, 3))], VOCABULARY)
    assert ends.unsupported_reason == "the model has more than 2 end tokens" and ends.has_penalties


def test_warming_up_leaves_nothing_behind() -> None:
    sampler = GpuSampler(2, CONTEXT, VOCABULARY, CPU)
    sampler.warm_up()
    assert not sampler.histories.on_device.marks.any() and not sampler.histories.synced
    rows = [row(3, prompt=(5, 6, 7), history=0, temperature=0, repetition_penalty=2.0)]
    values = logits(1)
    assert torch.equal(sampler.sample(values.clone(), rows), sample(values.clone(), rows))
