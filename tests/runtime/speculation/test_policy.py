"""Drafts change the number of tokens per step, never the tokens: the engine's drafter on several families."""

import random
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localllm.runtime.engine import Engine
from localllm.runtime.sampler import MaskProvider
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.policy import MAX_DRAFTS, SpeculativeDrafter
from localllm.runtime.speculation.step_cost import StepCost
from tests.models.families import FAMILIES
from tests.runtime.test_engine import Answers, run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

ROWS = 30
FEW = {7: 60.0, 8: 60.0, 9: 60.0}  # words of a model that says only these, in an order of its own


def cheap(rows: int) -> float:
    return 1 + 0.02 * (rows - 1)


class CountingDrafter(SpeculativeDrafter):
    """Drafter with fixed step costs, independent of the machine's load; counts verified tokens."""

    def __init__(self, widths: Iterable[int] = ()):
        super().__init__(StepCost(cheap), ROWS, lambda _: tuple(widths))
        self.drafted = self.accepted = 0

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        assert drafts < ROWS and seconds > 0  # others may have been admitted to the step

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        super().on_verified(sequence, drafted, accepted)
        self.drafted += drafted
        self.accepted += accepted


@pytest.fixture(scope="module", params=["Qwen3", "Gemma 3", "Qwen3-MoE", "Qwen3.5", "LFM2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "Llama")
    return path


@cache
def prompts(count: int) -> list[list[int]]:
    """Prompts with repetitions, to which a random model often answers with repetitions."""
    rng, found = random.Random(0), []
    for _ in range(count):
        phrase = [rng.randrange(3, 320) for _ in range(rng.randrange(3, 9))]
        found.append(phrase * rng.randrange(1, 4) + phrase[: rng.randrange(1, 3)])
    return found


def answers(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    got = run(engine, sequences)
    return [tokens(got[s.request.id]) for s in sequences]


@pytest.mark.quick_every(3)
def test_greedy_answers_to_forty_prompts_are_the_same_byte_for_byte(folder: Path) -> None:
    """Covers 200 prompts over five families, individually and in a batch."""

    def asked() -> list[Sequence]:
        biases = [FEW, {}] * 20
        asked = zip(prompts(40), biases, strict=True)
        return [sequence(prompt, temperature=0, max_tokens=14, logit_bias=bias) for prompt, bias in asked]

    expected = answers(make_engine(folder), asked())
    guessing = CountingDrafter()
    assert answers(make_engine(folder, rows=80, drafter=guessing), asked()) == expected
    alone = CountingDrafter()
    engine = make_engine(folder, rows=80, drafter=alone)
    assert [answers(engine, [s])[0] for s in asked()[:8]] == expected[:8]
    assert guessing.accepted > 20 and alone.accepted
    assert not guessing.tracks and not alone.tracks


CASES = {
    "sampled": {"temperature": 0.7, "top_k": 2, "logit_bias": FEW},
    "penalties": {"temperature": 0, "repetition_penalty": 1.02, "presence_penalty": 0.1, "logit_bias": FEW},
    "sampled with penalties": {"temperature": 0.5, "top_p": 0.6, "frequency_penalty": 0.02, "logit_bias": FEW},
    "few words": {"temperature": 0.5, "logit_bias": FEW},
    "a stop id": {"temperature": 0.3, "logit_bias": FEW, "stop_ids": (9,)},
}


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_the_same_seed_gives_the_same_tokens(llama: Path, params: dict[str, object], asynchronous: bool) -> None:
    def asked() -> list[Sequence]:
        return [sequence(p, seed, max_tokens=24, **params) for seed, p in enumerate(prompts(12))]

    expected = answers(make_engine(llama), asked())
    engine, guessing = make_engine(llama), CountingDrafter()
    engine.drafter = guessing
    engine.runner.asynchronous = asynchronous
    assert answers(engine, asked()) == expected
    assert guessing.accepted


def test_every_token_has_log_probabilities(llama: Path) -> None:
    def told(got: Answers) -> list[tuple[int, float]]:
        [events] = got.values()
        return [(e.logprob.token_id, round(e.logprob.logprob, 4)) for e in events if e.logprob]

    asked = {"temperature": 0, "max_tokens": 30, "logprobs": 2, "logit_bias": {7: 60.0}}
    expected = told(run(make_engine(llama), [sequence(prompts(1)[0], **asked)]))
    guessing = CountingDrafter()
    assert told(run(make_engine(llama, drafter=guessing), [sequence(prompts(1)[0], **asked)])) == expected
    assert guessing.accepted and len(expected) == 30


@pytest.mark.parametrize("widths", [(), (1, 4, 8)], ids=["any", "captured"])
def test_drafting_sequences_mix_with_others(llama: Path, widths: tuple[int, ...]) -> None:
    def asked() -> list[Sequence]:
        repeats = [sequence(p, temperature=0, max_tokens=24, logit_bias={7: 60.0}) for p in prompts(2)]
        return repeats + [sequence(p, 1, temperature=1.5, max_tokens=20) for p in prompts(4)[2:]]

    expected = answers(make_engine(llama), asked())
    guessing, together = CountingDrafter(widths), asked()
    got = run(make_engine(llama, drafter=guessing), together)
    assert [tokens(got[s.request.id]) for s in together] == expected
    drafted = [sum(e.drafted for e in got[s.request.id]) for s in together]
    accepted = [sum(e.accepted for e in got[s.request.id]) for s in together]
    assert min(drafted[:2]) > 6 * max(1, *drafted[2:]) and min(accepted[:2]) > 10
    # What only fills a step up to its width counts as no guess.
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))


def test_no_step_draws_from_more_than_is_planned(llama: Path) -> None:
    guessing = CountingDrafter()  # which looks itself
    engine = make_engine(llama, drafter=guessing)
    answers(engine, [sequence(p, temperature=0, max_tokens=24, logit_bias={7: 60.0}) for p in prompts(12)])
    assert guessing.accepted > 100


class ForcedSentence:
    """A grammar of one sentence, whose last words are forced."""

    def __init__(self, sentence: list[int], forced_from: int):
        self.sentence, self.forced_from, self.at = sentence, forced_from, 0
        self.cut = False

    @property
    def finished(self) -> bool:
        return self.at == len(self.sentence)

    def begin(self, drafts: list[int]) -> MaskProvider:
        def masks() -> list[NDArray[np.int32] | None]:
            found = []
            for token in (self.sentence + [0] * 32)[self.at : self.at + 1 + len(drafts)]:
                bits = np.zeros(320, np.uint8)
                bits[token] = 1
                found.append(np.packbits(bits, bitorder="little").view(np.int32))
            return found

        assert self.allowed(drafts) == list(drafts)
        return masks

    def advance(self, token_id: int) -> None:
        assert token_id == self.sentence[self.at]
        self.at += 1

    def forced(self, most: int) -> list[int]:
        return self.sentence[self.at : self.at + most] if self.at >= self.forced_from else []

    def allowed(self, drafts: list[int]) -> list[int]:
        coming = self.sentence[self.at :]
        right = next((i for i, t in enumerate(drafts) if coming[i : i + 1] != [t]), len(drafts))
        return list(drafts[:right])


def test_forced_tokens_are_drafted_and_forbidden_ones_never(llama: Path) -> None:
    phrase = [5, 6, 7, 8, 9, 10]
    sentence = [*phrase, 300, 301, *phrase, 40, 41, *range(100, 120)]
    asked = sequence([*phrase, 200, 201, 3], temperature=1, max_tokens=60)
    asked.constraint = ForcedSentence(sentence, forced_from=16)
    guessing = CountingDrafter()
    [events] = run(make_engine(llama, drafter=guessing), [asked]).values()
    assert tokens(events) == sentence
    # Lookup's wrong ones were never drafted; the last of all was not needed.
    assert guessing.drafted - 1 <= guessing.accepted >= 20


def test_a_long_prompt_is_known_when_its_answer_begins(llama: Path) -> None:
    guessing = CountingDrafter()
    engine = make_engine(llama, token_budget=64, drafter=guessing)
    asked = sequence([7] * 120, temperature=0, max_tokens=40, logit_bias={7: 60.0})
    [events] = run(engine, [asked]).values()
    steps = len(tokens(events)) - guessing.accepted
    assert steps <= 8 and guessing.drafted <= MAX_DRAFTS * steps


def test_without_a_match_no_step_waits(llama: Path) -> None:
    guessing = CountingDrafter()
    rising = sequence(list(range(3, 60)), temperature=0)
    again = sequence([*range(3, 60), 3, 4, 5, 6, 7, 8], temperature=0)
    for known in (rising, again):
        guessing.track(known)
    assert not guessing.may_draft(rising)
    assert guessing.may_draft(again)


def test_a_sequence_can_be_cancelled_during_verification(llama: Path) -> None:
    engine, guessing = make_engine(llama), CountingDrafter()
    engine.drafter = guessing
    engine.runner.asynchronous = True
    gone, stays = (sequence([7] * 9, temperature=0, max_tokens=40, logit_bias={7: 60.0}) for _ in range(2))
    engine.add_sequence(gone)
    engine.add_sequence(stays)
    while not gone.draft_ids:
        engine.step()
    assert engine.in_flight
    engine.cancel(gone)
    said = []
    while engine.has_unfinished_requests:
        said += [e.token_id for e in engine.step() if e.sequence is stays]
    assert len(stays.token_ids) == 49 and set(said) == {7}
    assert torch.isfinite(engine.logits([7, 7])).all()
    engine.pool.check_all_free()


class SlowDraftModel:
    """A slow draft model without drafts."""

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def draft(self, sequences: list[Sequence]) -> None:
        time.sleep(0.01)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        assert seconds > 0

    def forget(self, sequence: Sequence) -> None:
        pass


def test_draft_time_is_charged_to_its_own_step(llama: Path) -> None:
    """Steps that include a prompt are not recorded."""
    engine, guessing = make_engine(llama), SpeculativeDrafter(StepCost(cheap), ROWS, draft_model=SlowDraftModel())
    engine.drafter = guessing
    first, late = (sequence([3, 4, 5], temperature=0, max_tokens=9) for _ in range(2))
    engine.add_sequence(first)
    for _ in range(2):
        engine.step()
    engine.add_sequence(late)
    engine.step()
    engine.cancel(late)
    guessing.draft([])
    guessing.on_step(1, 0, 1e-3)
