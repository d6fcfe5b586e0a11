"""The sampler against the logits processors of `transformers`, its draws against the distribution, and each row
independent of its batch."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from localllm.metrics import Stopwatch
from localllm.request import Request, SamplingParams
from localllm.runtime import sampler
from localllm.runtime.sampler import (
    ALL_FORBIDDEN,
    NOT_FINITE,
    SamplingSpec,
    logprob_table,
    parse_logprobs,
    sample,
    uniform_random,
)
from localllm.runtime.sequence import Sequence

VOCABULARY = 211


def row(
    position: int = 0, seed: int = 1, prompt: list[int] | None = None, said: list[int] | None = None, **params: Any
) -> SamplingSpec:
    said = said or []
    return SamplingSpec(SamplingParams(**params), seed, position, [*(prompt or []), *said], Counter(said))


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def drawn_from(values: torch.Tensor, count: int, **params: Any) -> torch.Tensor:
    """Frequency of each token over `count` positions."""
    many = values.expand(count, -1).clone()
    choices = sample(many, [row(position=i, **params) for i in range(count)])
    return torch.bincount(choices, minlength=VOCABULARY) / count


WARPERS = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
}


def expected_probs(values: torch.Tensor, **params: Any) -> torch.Tensor:
    """Probabilities after the logits warpers of `transformers` for `params`."""
    import transformers

    scores, ids = values[None].clone(), torch.tensor([[0]])
    for name, warper in WARPERS.items():
        if name in params:
            scores = getattr(transformers, warper)(params[name])(ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers(params: dict[str, Any]) -> None:
    values = logits(1)[0]
    expected, count = expected_probs(values, **params), 20_000
    got = drawn_from(values, count, **{"temperature": 1.0, **params})
    assert not got[expected == 0].any()
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((got - expected).abs() <= 5 * deviation + 1e-9).all()


def test_top_p_is_exact_where_the_first_candidates_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    values = logits(3)
    top_p = torch.tensor([[0.5], [0.99], [1.0]])
    exact = sampler.top_p_threshold(values, top_p)
    monkeypatch.setattr(sampler, "TOP_P_CANDIDATES", 4)
    assert torch.equal(sampler.top_p_threshold(values, top_p), exact)
    for threshold, value, p in zip(exact[:2, 0], values, (0.5, 0.99), strict=False):
        assert torch.equal(value >= threshold, expected_probs(value, top_p=p) > 0)


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    values, ids = logits(1), [3, 5, 5, 8]
    penalized = values.clone()
    sampler.apply_penalties(penalized, [row(prompt=ids[:2], said=ids[2:], repetition_penalty=1.4)])
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([ids]), values.clone())
    torch.testing.assert_close(penalized, expected)


def test_repetition_penalty_looks_at_the_last_tokens_only() -> None:
    values = torch.ones(1, VOCABULARY)
    sampler.apply_penalties(values, [row(prompt=[1, 2], said=[3], repetition_penalty=2.0, repeat_last_n=2)])
    assert [t for t in range(VOCABULARY) if values[0, t] == 0.5] == [2, 3]


def test_presence_and_frequency_count_the_answer_and_not_the_prompt() -> None:
    values = torch.zeros(1, VOCABULARY)
    sampler.apply_penalties(
        values, [row(prompt=[1], said=[2, 2, 3], presence_penalty=0.5, frequency_penalty=0.25)]
    )
    assert values[0, :5].tolist() == [0.0, 0.0, -1.0, -0.75, 0.0]


def test_bias_moves_the_choice_and_minus_infinity_forbids() -> None:
    values = logits(2)
    best = values.argmax(-1).tolist()
    pushed, forbidden = (
        row(temperature=0, logit_bias={7: 100}),
        row(temperature=0, logit_bias={best[1]: -torch.inf}),
    )
    choice = sample(values, [pushed, forbidden]).tolist()
    assert choice[0] == 7
    assert choice[1] != best[1]


@pytest.mark.parametrize("seed", range(20))
def test_a_row_draws_the_same_in_any_batch(seed: int) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.3},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.02, "presence_penalty": 1.0, "said": [1, 2, 3]},
    ]
    values = logits(len(kinds), seed).bfloat16().float()  # with many ties
    rows = [row(position=seed, seed=seed, **kind) for kind in kinds]
    together = sample(values.clone(), rows).tolist()
    alone = [sample(values[i : i + 1].clone(), [r]).item() for i, r in enumerate(rows)]
    assert together == alone


def test_equal_logits_are_kept_or_dropped_together() -> None:
    values = torch.zeros(VOCABULARY)
    assert (drawn_from(values, 4000, temperature=1.0, top_k=3) > 0).sum() == VOCABULARY


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1000])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    choice = sample(logits(1), [row(temperature=temperature)])
    assert 0 <= choice.item() < VOCABULARY


def test_nan_is_reported_and_does_not_spread() -> None:
    values = logits(3)
    values[1, 5] = torch.nan
    choice = sample(values, [row(temperature=t) for t in (0, 1, 1)])
    assert choice[1] == NOT_FINITE
    assert (choice[[0, 2]] >= 0).all()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_allowed_tokens_is_reported(temperature: float) -> None:
    forbidden = row(temperature=temperature, logit_bias=dict.fromkeys(range(VOCABULARY), -torch.inf))
    choice = sample(logits(2), [forbidden, row(temperature=temperature)])
    assert choice[0] == ALL_FORBIDDEN
    assert choice[1] >= 0


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    n = 50_000
    for seeds, positions in [
        (torch.zeros(n, dtype=torch.int64), torch.arange(n)),
        (torch.arange(n), torch.zeros(n, dtype=torch.int64)),
        (torch.full((n,), 2**63 - 1), torch.arange(n)),
    ]:
        u = uniform_random(seeds, positions)
        assert u.min() >= 0 and u.max() < 1
        bins = torch.histc(u, 100, 0, 1)
        assert ((bins - n / 100).abs() < 5 * (n / 100) ** 0.5).all()
        assert abs(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]) < 0.02


def test_log_probabilities_are_sorted_and_of_the_model_itself() -> None:
    values = logits(2)
    expected = values.log_softmax(-1)
    got = parse_logprobs(logprob_table(expected, torch.tensor([4, 5]), 3), [4, 5], [3, 0])
    assert got[0].logprob == pytest.approx(expected[0, 4].item())
    assert [t for t, _ in got[0].top] == expected[0].topk(3).indices.tolist()
    assert got[1].top == ()


@pytest.mark.parametrize("generated", [0, 2, 3, 5])
def test_min_tokens_masks_end_tokens_as_transformers_does(generated: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    prompt, ends, least = [3, 5], [7, 100], 3
    params = SamplingParams(temperature=0.9, min_tokens=least, stop_ids=(7,))
    of = Sequence(Request(tuple(prompt), params, 0.0), 1, frozenset({100}), 50, Stopwatch(0.0))
    of.token_ids += [9] * generated
    of.state = SimpleNamespace(length=len(of.token_ids))  # type: ignore[assignment]
    [spec] = of.sampling_specs()
    values = logits(1) + torch.nn.functional.one_hot(torch.tensor([7, 100]), VOCABULARY).sum(0) * 9.0
    reference = MinNewTokensLengthLogitsProcessor(len(prompt), least, torch.tensor(ends))
    expected = reference(torch.tensor([of.token_ids]), values.clone())
    masked = values.clone()
    sampler.apply_masks(masked, [spec])
    assert torch.equal(masked, expected)
    p, count = (expected / 0.9).softmax(-1)[0], 20_000
    specs = [replace(spec, position=i) for i in range(count)]
    drawn = torch.bincount(sample(values.expand(count, -1).clone(), specs), minlength=VOCABULARY) / count
    assert not drawn[p == 0].any()
    assert ((drawn - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 5 / count).all()


def test_a_grammar_that_can_only_end_outweighs_min_tokens() -> None:
    def masked_by(*allowed: int) -> list[int]:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
        values = logits(1)
        sampler.apply_masks(values, [replace(row(), masks=lambda: [words], forbidden_ids=(7, 100, VOCABULARY))])
        return (values[0] > -torch.inf).nonzero()[:, 0].tolist()

    assert masked_by(3, 7) == [3]
    assert masked_by(7) == [7]
