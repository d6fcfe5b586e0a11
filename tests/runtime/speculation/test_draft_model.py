"""A draft model changes the number of tokens per step, never the tokens, and leaves nothing behind."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.sequence import Sequence
from tests.runtime.speculation.pairs import draft_model, drafting, make_pair
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_engine

Pair = tuple[Path, Path]


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3.5", "LFM2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param, noise=0.02)


def seeded(sequence: Sequence) -> Sequence:
    """Set the seed of the request explicitly."""
    params = replace(sequence.request.params, seed=sequence.seed)
    sequence.request = replace(sequence.request, params=params)
    return sequence


def questions(count: int, begin: int, **params: object) -> list[Sequence]:
    rng = random.Random(begin)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
    return [sequence(prompt, seed=i, **params) for i, prompt in enumerate(prompts)]


def told(answers: dict[int, list]) -> list[list[int]]:
    return [tokens(answer) for answer in answers.values()]


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
def test_greedy_answers_are_the_same_and_take_fewer_steps(pair: Pair, asynchronous: bool) -> None:
    asked = {"temperature": 0, "max_tokens": 24}
    expected = told(run(make_engine(pair[0]), questions(12, 1, **asked)))
    engine, model = drafting(*pair, rows=200)
    engine.runner.asynchronous = asynchronous
    answers = run(engine, questions(12, 1, **asked))
    assert told(answers) == expected
    drafted = sum(e.drafted for answer in answers.values() for e in answer)
    accepted = sum(e.accepted for answer in answers.values() for e in answer)
    assert 0.2 < accepted / drafted < 1
    model.pool.check_all_free()
    assert not model.draft_sequences


def test_a_model_drafting_for_itself_is_always_accepted(pair: Pair) -> None:
    asked = {"temperature": 0, "max_tokens": 25}
    engine, _ = drafting(pair[0], pair[0], rows=200)
    [answer] = run(engine, questions(1, 2, **asked)).values()
    assert [e.drafted for e in answer if e.drafted] == [8, 8, 5]  # 25 = 1 + 9 + 9 + 6
    assert sum(e.accepted for e in answer) == 21


def test_drafts_leave_seeded_texts_unchanged(pair: Pair) -> None:
    """Samples with every parameter that changes the distribution, in one batch."""
    settings = [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.8, "frequency_penalty": 0.5},
    ]

    def fresh() -> list[Sequence]:
        prompt = list(range(3, 20))
        return [seeded(sequence(prompt, i, max_tokens=20, **s)) for i, s in enumerate(settings * 2)]

    expected = told(run(make_engine(pair[0]), fresh()))
    engine, _ = drafting(*pair, rows=200)
    answers = run(engine, fresh())
    assert told(answers) == expected
    assert any(e.accepted for answer in answers.values() for e in answer)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_leaves_greedy_answers_and_both_pools_as_they_were(pair: Pair, seed: int) -> None:
    """Covers preemption, chunks, few token slots, a drafter without free blocks, cancellation and log
    probabilities.
    """
    rng = random.Random(seed)
    choices = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0.9},
    ]
    asked = [rng.choice(choices) | {"max_tokens": rng.randrange(1, 20)} for _ in range(8)]
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))] for _ in asked]

    def fresh() -> list[Sequence]:
        return [seeded(sequence(p, 7, **s)) for p, s in zip(prompts, asked, strict=True)]

    roomy = make_engine(pair[0])
    alone = [tokens(run(roomy, [s])[s.request.id]) for s in fresh()]
    engine, _ = drafting(
        pair[0], pair[1], blocks=rng.randrange(9, 16), rows=12, token_budget=rng.choice([3, 40, 512])
    )
    model = engine.drafter = draft_model(pair[1], blocks=rng.randrange(4, 12), rows=rng.randrange(1, 12))
    model.token_budget = rng.choice([1, 7, 512])
    engine.runner.asynchronous = seed % 2 == 1
    cancelled = sequence([5, 6, 7], temperature=1.0, max_tokens=50)
    engine.add_sequence(cancelled)
    for _ in range(3):
        engine.step()
    engine.cancel(cancelled)
    got = run(engine, together := fresh())
    assert [tokens(got[s.request.id]) for s in together] == alone
    model.pool.check_all_free()
    assert not model.draft_sequences


def test_a_smaller_and_a_larger_vocabulary_are_cut_and_filled(tmp_path: Path) -> None:
    target, _ = make_pair(tmp_path / "one", "Qwen3", 0.0)
    expected = told(run(make_engine(target), questions(4, 3, temperature=0, max_tokens=12)))
    for rows in (250, 400):
        _, draft = make_pair(tmp_path / str(rows), "Qwen3", 0.0, vocab_size=rows)
        engine, _ = drafting(target, draft)
        assert told(run(engine, questions(4, 3, temperature=0, max_tokens=12))) == expected
        run(engine, questions(4, 3, temperature=1.0, max_tokens=12))


def test_a_second_turn_hits_the_drafters_cache(pair: Pair) -> None:
    engine, model = drafting(pair[0], pair[0], rows=200)
    first = sequence(list(range(3, 40)), temperature=0, max_tokens=9)
    answer = tokens(run(engine, [first])[first.request.id])
    found = model.pool.find_longest_prefix([*range(3, 40), *answer, 7, 8])
    assert len(found[0]) * model.pool.block_size >= 32


def test_a_failed_draft_is_no_draft(pair: Pair) -> None:
    """A drafter that computes NaN neither slows down nor changes answers."""
    for params in ({"temperature": 0}, {"temperature": 1.0}):
        expected = told(run(make_engine(pair[0]), questions(3, 4, max_tokens=8, **params)))
        engine, model = drafting(*pair)
        model.runner.model.norm.weight.fill_(float("nan"))
        answers = run(engine, questions(3, 4, max_tokens=8, **params))
        assert told(answers) == expected
        assert not any(e.drafted for answer in answers.values() for e in answer)
