"""One step verifies several draft tokens: accepted ones save steps, and rejected ones change nothing."""

from pathlib import Path

import pytest

from localllm.request import FinishReason
from localllm.runtime.engine import Engine
from localllm.runtime.sequence import Sequence
from tests.models.families import FAMILIES
from tests.runtime.test_engine import Answers, run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

PROMPT = list(range(3, 20))


class FixedDrafter:
    """Drafts the given tokens."""

    def __init__(self, coming: list[int], most: int):
        self.coming, self.most = coming, most
        self.accepted: list[int] = []

    def may_draft(self, sequence: Sequence) -> bool:
        return False

    def draft(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            said = len(s.token_ids) - s.prompt_len
            s.draft_ids = self.coming[said : said + min(self.most, s.max_drafts)]

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self.accepted.append(accepted)

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        assert seconds > 0

    def forget(self, sequence: Sequence) -> None:
        pass


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes)
    return path


def one(engine: Engine, **params: object) -> list[int]:
    [answer] = run(engine, [sequence(PROMPT, **params)]).values()
    return tokens(answer)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"frequency_penalty": 1.0}], ids=str)
def test_accepted_drafts_save_steps_and_change_nothing(folder: Path, params: dict[str, float]) -> None:
    expected = one(make_engine(folder), max_tokens=21, **params)
    engine = make_engine(folder)
    told = engine.drafter = FixedDrafter(expected, most=4)
    assert one(engine, max_tokens=21, **params) == expected
    assert told.accepted == [0, 4, 4, 4, 4]  # the prompt brings one, then each step four drafts and one more


def test_rejected_drafts_change_nothing(folder: Path) -> None:
    expected = one(make_engine(folder), max_tokens=20, temperature=0)
    engine = make_engine(folder)
    wrong = [token if place % 3 else (token + 1) % 320 for place, token in enumerate(expected)]
    told = engine.drafter = FixedDrafter(wrong, most=3)
    assert one(engine, max_tokens=20, temperature=0) == expected
    assert set(told.accepted) >= {0, 2}


def test_log_probabilities_are_those_without_drafts(folder: Path) -> None:
    def told(answers: Answers) -> list[tuple[int, float]]:
        [events] = answers.values()
        return [(e.logprob.token_id, round(e.logprob.logprob, 4)) for e in events if e.logprob]

    asked = {"temperature": 0, "max_tokens": 12, "logprobs": 2}
    expected = told(run(make_engine(folder), [sequence(PROMPT, **asked)]))
    engine = make_engine(folder)
    engine.drafter = FixedDrafter([token for token, _ in expected], most=5)
    assert told(run(engine, [sequence(PROMPT, **asked)])) == expected


def test_an_answer_ends_at_an_end_token_within_a_draft(folder: Path) -> None:
    expected = one(make_engine(folder), max_tokens=12, temperature=0)
    end = expected[5]
    first = expected.index(end)
    engine = make_engine(folder)
    engine.drafter = FixedDrafter(expected, most=8)
    [events] = run(engine, [sequence(PROMPT, eos=frozenset([end]), temperature=0, max_tokens=12)]).values()
    assert tokens(events) == expected[: first + 1]
    assert events[-1].finish_reason is FinishReason.STOP and events[-1].is_end_token


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}], ids=str)
def test_drafts_of_end_tokens_before_min_tokens_change_nothing(folder: Path, params: dict[str, float]) -> None:
    free = one(make_engine(folder), max_tokens=16, **params)
    ends = frozenset([free[2], free[5]])
    asked = {"max_tokens": 16, "min_tokens": 8, **params}

    def answer(engine: Engine) -> list[int]:
        [events] = run(engine, [sequence(PROMPT, eos=ends, **asked)]).values()
        return tokens(events)

    expected = answer(make_engine(folder))
    assert len(expected) > 8 and not ends & set(expected[:8])
    engine = make_engine(folder)
    wrong = [free[2] if index in (4, 7) else token for index, token in enumerate(expected)]
    told = engine.drafter = FixedDrafter(wrong, most=5)
    assert answer(engine) == expected
    assert any(told.accepted)


def test_rejected_drafts_are_never_cached(folder: Path) -> None:
    expected = one(make_engine(folder), max_tokens=20, temperature=0)
    engine = make_engine(folder)
    engine.drafter = FixedDrafter([(token + 1) % 320 for token in expected], most=10)
    one(engine, max_tokens=20, temperature=0)
    engine.drafter = None
    again = sequence([*PROMPT, *expected], temperature=0, max_tokens=5)
    got = tokens(run(engine, [again])[again.request.id])
    anew = sequence([*PROMPT, *expected], temperature=0, max_tokens=5)
    assert got == tokens(run(make_engine(folder), [anew])[anew.request.id])
    assert again.cached_tokens == 32
