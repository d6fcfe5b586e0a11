"""Candidates of a draw against the logits processors of `transformers` and against many draws."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from localllm.request import SamplingParams
from localllm.runtime.sampler import SamplingSpec, apply_masks, apply_penalties, sample
from localllm.runtime.step_reports import likeliest_candidates
from tests.runtime.test_sampler import WARPERS

VOCABULARY = 97
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 12},
    {"temperature": 1.7, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {
        **{"temperature": 1.4, "top_k": 40, "top_p": 0.95, "min_p": 0.03},
        **{"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        "logit_bias": {3: 4.0, 5: -torch.inf},
    },
]


def row(seed: int, masked: bool, **params: Any) -> SamplingSpec:
    masks = None
    if masked:
        words = np.random.default_rng(seed).integers(0, 2**31, -(-VOCABULARY // 32), dtype=np.int32)
        masks = lambda: [words]  # noqa: E731
    return SamplingSpec(SamplingParams(**params), seed, 0, [1, 2, 3, 7, 7], Counter([7, 7]), masks=masks)


def values(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("masked", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_candidates_have_the_probabilities_of_transformers_and_the_rule_that_cut_them(
    params: dict[str, Any], masked: bool, seed: int
) -> None:
    logits, of = values(seed), row(seed, masked, **params)
    before = logits.clone()
    found = likeliest_candidates(logits, of, 9, VOCABULARY)
    assert torch.equal(logits, before)

    scores = logits[None].clone()
    left = [("", scores.clone())]
    apply_masks(scores, [of])
    left.append(("grammar", scores.clone()))
    apply_penalties(scores, [of])
    left.append(("logit_bias", scores.clone()))
    for name, warper in WARPERS.items():
        if name in params:
            scores = getattr(transformers, warper)(params[name])(torch.tensor([[0]]), scores)
            left.append((name, scores.clone()))
    chances = scores[0].double().softmax(-1)
    assert [each.token_id for each in found] == logits.argsort(descending=True).tolist()
    for each in found:
        cut = [n for (_, a), (n, b) in pairwise(left) if a[0, each.token_id] > -torch.inf >= b[0, each.token_id]]
        assert each.cut_by == (cut[0] if cut else "")
        assert each.chance == pytest.approx(chances[each.token_id].item(), rel=1e-4, abs=1e-9)
        assert (each.chance > 0) == (not each.cut_by)
        assert each.logprob == pytest.approx(logits.double().log_softmax(-1)[each.token_id].item(), abs=1e-5)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("masked", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("params", SETTINGS)
def test_draw_frequencies_match_the_probabilities(params: dict[str, Any], masked: bool) -> None:
    logits, of, count = values(11), row(11, masked, **params), 30_000
    draws = sample(logits.expand(count, -1).clone(), [replace(of, position=place) for place in range(count)])
    often = torch.bincount(draws, minlength=VOCABULARY)
    found = likeliest_candidates(logits, of, 0, VOCABULARY)
    assert not any(often[each.token_id] for each in found if each.cut_by)
    frequent = [each for each in found if each.chance * count >= 10]
    expected = [each.chance * count for each in frequent]
    observed = [int(often[each.token_id]) for each in frequent]
    rest = count - sum(expected)
    if rest > 5:
        expected, observed = [*expected, rest], [*observed, count - sum(observed)]
    assert len(expected) >= 2
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # five deviations of chi-square


def test_temperature_0_leaves_the_chosen_token(torch_alone: None) -> None:
    logits, of = values(3), row(3, False, temperature=0, repetition_penalty=50.0, logit_bias={8: -torch.inf})
    [taken] = sample(logits[None].clone(), [of]).tolist()
    found = {each.token_id: each for each in likeliest_candidates(logits, of, taken, VOCABULARY)}
    assert {token for token, each in found.items() if each.chance} == {taken}
    assert found[taken] == replace(found[taken], chance=1.0, cut_by="")
    assert found[8].cut_by == "logit_bias"
    assert {each.cut_by for token, each in found.items() if token not in (taken, 8)} == {"temperature"}


def test_the_sampled_token_is_listed_even_if_unlikely() -> None:
    logits, of = values(5), row(5, False, temperature=1.0)
    order = logits.argsort(descending=True).tolist()
    assert [each.token_id for each in likeliest_candidates(logits, of, order[50], 3)] == [*order[:3], order[50]]
    assert [each.token_id for each in likeliest_candidates(logits, of, order[1], 3)] == order[:3]


def test_a_token_of_probability_zero_is_cut_by_no_rule() -> None:
    logits, of = values(5), row(5, False, temperature=1.0, top_k=3)
    logits[4] = -torch.inf
    [*_, last] = likeliest_candidates(logits, of, 0, VOCABULARY)
    assert (last.token_id, last.logprob, last.chance, last.cut_by) == (4, -torch.inf, 0.0, "")


def test_an_end_token_is_cut_by_min_tokens() -> None:
    of = replace(row(1, masked=False), forbidden_ids=(9,))
    cut = {each.token_id: each.cut_by for each in likeliest_candidates(values(1), of, 8, VOCABULARY)}
    assert cut[9] == "min_tokens" and cut[8] == ""
