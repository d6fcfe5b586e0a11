"""The engine with a drafter has the target's distribution, and wrong acceptance rules are detected: chi-square
over the first three tokens of 2,000 answers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime import runner, sampler
from localllm.runtime.engine import Engine
from localllm.runtime.sampler import SamplingSpec, apply_penalties, filtered_probabilities, sample
from localllm.runtime.sequence import Sequence
from tests.runtime.speculation.pairs import draft_model, make_pair
from tests.runtime.speculation.test_acceptance import SURE, always, by_target, chance, redrawn
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_engine

VOCABULARY, ANSWERS, LENGTH = 8, 2_000, 3
PROMPT = [1, 4, 2, 2]
PARAMS: dict[str, Any] = {"temperature": 1.3, "top_k": 6, "min_p": 0.02, "presence_penalty": 0.7, "logprobs": 0}
LEAST = 5  # answers that a cell of the test expects; rarer ones share a cell


class ConstantDrafter:
    """Always drafts the same two tokens."""

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def draft(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            s.draft_ids = [5, 2][: s.max_drafts]

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), "Qwen3", noise=0.2, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> Tensor:
    """Probabilities [8, 8, 8] of the first three tokens, from the logits of every prefix."""
    engine, params = make_engine(pair[0]), SamplingParams(**PARAMS)
    found = torch.ones(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for length in range(LENGTH):
        for said in product(range(VOCABULARY), repeat=length):
            logits = engine.logits([*PROMPT, *said])[-1:].float().clone()
            rows = [SamplingSpec(params, 0, 0, [*PROMPT, *said], Counter(said))]
            apply_penalties(logits, rows)
            [p] = filtered_probabilities(logits, rows).double()
            shape = [VOCABULARY] + [1] * (LENGTH - length - 1)
            found[said] *= (p / p.sum()).view(shape)
    return found


def agreement(engine: Engine, expected: Tensor) -> float:
    asked = [sequence(PROMPT, seed, max_tokens=LENGTH + 1, **PARAMS) for seed in range(ANSWERS)]
    said = torch.tensor([tokens(answer)[:LENGTH] for answer in run(engine, asked).values()])
    place = said @ torch.tensor([VOCABULARY**2, VOCABULARY, 1])
    seen = torch.bincount(place, minlength=VOCABULARY**LENGTH)
    wanted = expected.flatten() * ANSWERS
    rare = wanted < LEAST
    if seen[wanted == 0].any():
        return 0.0
    return chance(
        torch.cat([seen[~rare], seen[rare].sum()[None]]), torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    )


def engine_with(pair: tuple[Path, Path], drafter: str) -> Engine:
    engine = make_engine(pair[0], blocks=512, max_running=64)
    engine.drafter = (
        ConstantDrafter() if drafter == "guess" else draft_model(pair[1], VOCABULARY, blocks=512, max_running=64)
    )
    return engine


@pytest.mark.parametrize("drafter", ["guess", "model"])
def test_answers_have_the_distribution_of_the_target(
    pair: tuple[Path, Path], expected: Tensor, drafter: str
) -> None:
    assert agreement(engine_with(pair, drafter), expected) > SURE


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [always, by_target, redrawn], ids=lambda rule: rule.__name__)
def test_a_wrong_rule_for_a_model_is_detected(
    pair: tuple[Path, Path], expected: Tensor, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "rejection_weights", wrong)
    assert agreement(engine_with(pair, "model"), expected) < 1e-9


def guessed(rows: list[SamplingSpec]) -> dict[int, int]:
    """Rows with a draft token, and that token, which the next row's counts include."""
    return {i: after.token_ids[-1] for i, after in enumerate(rows[1:]) if after.draft_index}


def takes_all(logits: Tensor, rows: list[SamplingSpec]) -> Tensor:
    choices = sample(logits, rows)
    for i, token in guessed(rows).items():
        choices[i] = token
    return choices


def draws_again(logits: Tensor, rows: list[SamplingSpec]) -> Tensor:
    """Wrong rule: sample again after a rejection, possibly the draft token."""
    again = sample(logits.clone(), [replace(row, seed=row.seed + ANSWERS) for row in rows])
    choices = sample(logits, rows)
    for i, token in guessed(rows).items():
        if choices[i] != token:
            choices[i] = again[i]
    return choices


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [takes_all, draws_again], ids=lambda rule: rule.__name__)
def test_a_wrong_rule_for_guesses_is_detected(
    pair: tuple[Path, Path], expected: Tensor, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "sample", wrong)
    assert agreement(engine_with(pair, "guess"), expected) < 1e-9
