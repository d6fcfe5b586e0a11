"""Every step is reported on request, and reports change no answer."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.metrics import StepReport
from localllm.runtime.engine import Engine
from localllm.runtime.sequence import Sequence
from tests.models.families import FAMILIES
from tests.runtime.test_engine import Answers, MistakenDrafter, sequence, tokens
from tests.tiny import make_checkpoint, make_engine


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes | {"tie_word_embeddings": False})
    return path


def asking(of: Sequence, count: int = 4) -> Sequence:
    of.request = replace(of.request, inspect=count)
    return of


def play(engine: Engine, sequences: list[Sequence]) -> Answers:
    """Run the engine like `run`, including the events at submission."""
    answers: Answers = {s.request.id: engine.add_sequence(s) for s in sequences}
    while engine.has_unfinished_requests:
        for event in engine.step():
            answers[event.sequence.request.id].append(event)
    engine.pool.check_all_free()
    assert not engine.step_reporter.queue_positions
    return answers


def steps(answers: Answers, of: Sequence) -> list[StepReport]:
    return [event.step for event in answers[of.request.id] if event.step]


def test_prompt_chunks_and_tokens_are_reported(folder: Path) -> None:
    engine = make_engine(folder, token_budget=16)
    asked = asking(sequence(list(range(3, 43)), temperature=0, max_tokens=4))
    answers = play(engine, [asked])
    waited, *found = steps(answers, asked)
    assert (waited.tokens, waited.place, waited.computed) == (0, 1, 0)
    assert [step.tokens for step in found] == [16, 16, 8, 1, 1, 1]
    assert [step.computed for step in found] == [16, 32, 40, 41, 42, 43]
    assert [step.blocks for step in found] == [2, 4, 5, 6, 6, 6]
    assert [len(step.candidates) for step in found] == [0, 0, 1, 1, 1, 1]
    assert {(step.running, step.waiting, step.place, step.found) for step in found} == {(1, 0, 0, 0)}
    assert {step.prompt for step in (waited, *found)} == {40}
    times = [time for step in found for time in (step.began_s, step.ended_s)]
    assert times == sorted(times)
    greedy = [step.candidates[0][0] for step in found[2:]]
    assert [each.token_id for each in greedy] == tokens(answers[asked.request.id])
    assert {each.chance for each in greedy} == {1.0}

    again = asking(sequence(list(range(3, 43)), temperature=0, max_tokens=1))
    [_, only] = steps(play(engine, [again]), again)
    assert (only.found, only.tokens) == (32, 8)


def test_a_prompt_is_reported_before_it_is_complete(folder: Path) -> None:
    asked = asking(sequence(list(range(3, 23)), max_tokens=0))
    engine = make_engine(folder, token_budget=16)
    events = play(engine, [asked])[asked.request.id]
    assert [event.step.tokens if event.step else None for event in events] == [0, 16, 4, None]


def test_queued_requests_report_their_position(folder: Path) -> None:
    engine = make_engine(folder, max_running=1)
    first, second, third = (asking(sequence([3, 4, n], temperature=0, max_tokens=n)) for n in (5, 6, 7))
    answers = play(engine, [first, second, third])
    waits = [[step for step in steps(answers, s) if not step.tokens] for s in (first, second, third)]
    assert [[(step.place, step.waiting) for step in each] for each in waits] == [
        [(1, 0)],
        [(2, 0), (1, 1)],
        [(3, 0), (2, 0), (1, 0)],
    ]


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(12))
def test_reports_change_no_answer(folder: Path, seed: int, asynchronous: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    settings = [
        {"temperature": 0},
        {"temperature": 0.9, "top_k": 20, "logprobs": 2},
        {"temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.4},
        {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.2, "prompt_logprobs": 1},
    ]

    def fresh() -> list[Sequence]:
        return [sequence(p, seed, max_tokens=12, **s) for p, s in zip(prompts, settings, strict=True)]

    def answered(sequences: list[Sequence], told: dict[int, list[int]]) -> tuple[Engine, Answers]:
        engine = make_engine(folder, token_budget=24, blocks=30, max_running=3)
        engine.runner.asynchronous = asynchronous
        engine.drafter = MistakenDrafter(random.Random(seed), told)
        return engine, play(engine, sequences)

    without = fresh()
    _, plain = answered(without, {s.request.id: [] for s in without})
    said = [tokens(plain[s.request.id]) for s in without]
    assert all(event.step is None for events in plain.values() for event in events)
    watched = [asking(s, rng.choice([0, 1, 5])) if place != 1 else s for place, s in enumerate(fresh())]
    engine, answers = answered(watched, {s.request.id: t for s, t in zip(watched, said, strict=True)})
    assert [tokens(answers[s.request.id]) for s in watched] == said
    for place, s in enumerate(watched):
        check(answers, s, place)
    drafted = sum(len(step.drafts) for s in watched for step in steps(answers, s))
    assert drafted <= engine.draft_tokens


def check(answers: Answers, s: Sequence, place: int) -> None:
    """Check that the reports of one sequence account for all of its tokens."""
    events, found = answers[s.request.id], steps(answers, s)
    if place == 1:
        assert not found
        return
    said = list(pieces(answers, s))
    assert [token for piece in said for token in piece] == tokens(events)
    worked = [step for step in found if step.tokens]
    assert worked[-1].blocks
    bringing = [step for step in worked if step.candidates or not s.request.inspect]
    if s.request.inspect:
        assert len(bringing) == len(said)
        for step, piece in zip(bringing, said, strict=True):
            assert len(step.candidates) == len(piece)
            for token, of in zip(piece, step.candidates, strict=True):
                assert {each.token_id: each.chance for each in of}[token] > 0
                assert len(of) in (s.request.inspect, s.request.inspect + 1)
            assert step.drafts[: step.accepted] == tuple(piece[: step.accepted])
            assert step.accepted in (len(piece) - 1, len(piece))
    else:
        assert not any(step.candidates for step in found)


def pieces(answers: Answers, s: Sequence) -> Iterator[list[int]]:
    """Tokens of each step that generated any."""
    piece: list[int] = []
    for event in answers[s.request.id]:
        if event.token_id is None:
            continue
        if event.step and piece:
            yield piece
            piece = []
        piece.append(event.token_id)
    yield piece
