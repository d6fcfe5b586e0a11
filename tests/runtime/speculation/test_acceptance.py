"""With any drafter, samples have the target's distribution: chi-square tests over at least 20,000 draws, which
wrong acceptance rules fail.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime import sampler
from localllm.runtime.sampler import (
    SamplingSpec,
    apply_masks,
    apply_penalties,
    filtered_probabilities,
    rejection_weights,
    sample,
    sample_drafts,
)

VOCABULARY, COUNT = 12, 20_000
SURE = 1e-4  # a right rule is refused once in 10,000 tests, and random numbers here are always the same
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "count": 5000},
    "bias": {"logit_bias": {3: 2.0, 4: -torch.inf}, "count": 5000},
}


def chance(seen: Tensor, expected: Tensor) -> float:
    """Return the p-value of Pearson's chi-square test of counts [K]; 0 if an impossible outcome occurred."""
    possible = expected > 0
    if seen[~possible].any():
        return 0.0
    seen, expected = seen[possible].double(), expected[possible].double()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, ((seen - expected) ** 2 / expected).sum() / 2).item()


def scores(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5


def drawn(allowed: int | None = None, count: int = COUNT, **params: Any) -> float:
    """Return the p-value of samples at one position with a draft of another model, over many seeds. allowed: bits
    of the tokens that a grammar allows.
    """
    target, other = scores(1), scores(1) * 0.5 + scores(2)
    said, given = [1, 2, 2, 7], SamplingParams(**params)
    masks = allowed and (lambda: [np.array([allowed], dtype=np.int32)])
    plain = SamplingSpec(given, 0, 4, said, Counter(said), masks=masks or None)
    rows = [replace(plain, seed=seed) for seed in range(count)]
    drafts, proposals = sample_drafts(other.expand(count, -1).clone(), rows)
    proposed = [
        # What a grammar forbids is no draft.
        replace(row, draft_and_probs=(draft, proposal)) if allowed is None or allowed >> draft & 1 else row
        for row, draft, proposal in zip(rows, drafts.tolist(), proposals, strict=True)
    ]
    choices = sample(target.expand(count, -1).clone(), proposed)
    alone = target[None].clone()
    apply_masks(alone, rows[:1])
    apply_penalties(alone, rows[:1])
    [p] = filtered_probabilities(alone, rows[:1])
    return chance(torch.bincount(choices, minlength=VOCABULARY), p / p.sum() * count)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS)
def test_a_drawn_draft_leaves_the_distribution(params: dict[str, Any]) -> None:
    assert drawn(**params) > SURE


def test_a_drawn_draft_leaves_the_distribution_of_a_grammar() -> None:
    assert drawn(allowed=0b0111_1011_1101, temperature=0.8) > SURE


def always(target: Tensor, proposal: Tensor, drafts: Tensor, points: Tensor) -> Tensor:
    return torch.zeros_like(target).scatter(-1, drafts[:, None], 1)


def by_target(target: Tensor, proposal: Tensor, drafts: Tensor, points: Tensor) -> Tensor:
    """Wrong rule: accept with p(d), as if the draft were deterministic."""
    return rejection_weights(target, (torch.ones_like(proposal)), drafts, points)


def redrawn(target: Tensor, proposal: Tensor, drafts: Tensor, points: Tensor) -> Tensor:
    """Wrong rule: sample from the target itself after a rejection."""
    right = rejection_weights(target, proposal, drafts, points)
    stands = right.gather(-1, drafts[:, None]) > 0
    return torch.where(stands, right, target)


def turned(target: Tensor, proposal: Tensor, drafts: Tensor, points: Tensor) -> Tensor:
    """Wrong rule: sample from max(q - p, 0)."""
    right = rejection_weights(target, proposal, drafts, points)
    stands = right.gather(-1, drafts[:, None]) > 0
    return torch.where(stands, right, (proposal - target).clamp(min=0))


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize("wrong", [always, by_target, redrawn, turned], ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_detected(wrong: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "rejection_weights", wrong)
    assert drawn() < 1e-12
