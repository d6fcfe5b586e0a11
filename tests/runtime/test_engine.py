"""Any mix of sequences, chunk sizes, budgets and block counts gives each sequence the tokens that it gets alone,
and leaks no block, including steps that are launched before the previous one is read.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.metrics import Stopwatch
from localllm.request import FinishReason, Request, SamplingParams
from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.sequence import Sequence
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint, make_engine

Answers = dict[int, list[TokenEvent]]


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3.5", "LFM2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes | {"tie_word_embeddings": False})
    return path


def sequence(prompt: list[int], seed: int = 0, eos: frozenset[int] = frozenset(), **params: object) -> Sequence:
    request = Request(tuple(prompt), SamplingParams(**params), 0.0)  # pyright: ignore[reportArgumentType]
    limit = len(prompt) + (8 if request.params.max_tokens is None else request.params.max_tokens)
    return Sequence(request, seed, eos, limit, Stopwatch(0.0))


def run(engine: Engine, sequences: list[Sequence]) -> Answers:
    events: Answers = {s.request.id: [] for s in sequences}
    for s in sequences:
        engine.add_sequence(s)
    for _ in range(5000):
        if not engine.has_unfinished_requests:
            break
        for event in engine.step():
            events[event.sequence.request.id].append(event)
    assert not engine.has_unfinished_requests
    engine.pool.check_all_free()
    assert len(engine.free_token_slots) == len(engine.runner.newest_tokens)
    assert all(answer[-1].finish_reason for answer in events.values())
    return events


def tokens(answer: list[TokenEvent]) -> list[int]:
    return [e.token_id for e in answer if e.token_id is not None]


class MistakenDrafter:
    """Drafts the known continuation, with random mistakes."""

    def __init__(self, rng: random.Random, told: dict[int, list[int]]):
        self.rng, self.told = rng, told
        self.right = self.drafted = 0

    def may_draft(self, sequence: Sequence) -> bool:
        return self.rng.random() < 0.5

    def draft(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            assert not s.unread_count and not s.draft_ids and not s.finished
            said = len(s.token_ids) - s.prompt_len
            coming = self.told[s.request.id][said : said + self.rng.randrange(0, 16)][: s.max_drafts]
            s.draft_ids = [t if self.rng.random() < 0.8 else self.rng.randrange(320) for t in coming]

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.drafted += drafted
        self.right += accepted

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        assert seconds > 0

    def forget(self, sequence: Sequence) -> None:
        assert sequence.finished


@pytest.fixture(scope="module", params=["DeepSeek-V3", "Gemma 4, all at once"])
def other_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes)
    return path


@pytest.mark.quick_every(11)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(40))
def test_any_mix_gives_each_sequence_the_tokens_it_gets_alone(folder: Path, seed: int, asynchronous: bool) -> None:
    mix(folder, seed, asynchronous)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(40, 42))
def test_any_mix_with_latents_or_shared_keys(other_folder: Path, seed: int, asynchronous: bool) -> None:
    mix(other_folder, seed, asynchronous)


def mix(folder: Path, seed: int, asynchronous: bool) -> None:
    rng = random.Random(seed)
    base = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 30))]
    prompts = [
        base[: rng.randrange(len(base) + 1)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 25))]
        for _ in range(rng.randrange(2, 7))
    ]
    choices = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.4},
        {"temperature": 0, "prompt_logprobs": 1},
    ]
    settings = [rng.choice(choices) | {"max_tokens": rng.randrange(0, 20)} for _ in prompts]
    eos = frozenset(rng.sample(range(320), 8))

    def fresh() -> list[Sequence]:
        return [sequence(p, seed, eos, **s) for p, s in zip(prompts, settings, strict=True)]

    roomy = make_engine(folder)
    alone = [tokens(run(roomy, [s])[s.request.id]) for s in fresh()]
    need = max(-(-s.max_len // 8) for s in fresh())
    engine = make_engine(
        folder,
        blocks=need + rng.randrange(0, 12),
        rows=rng.randrange(1, 12),
        token_budget=rng.choice([1, 3, 8, 40, 512]),
        max_running=rng.choice([1, 3, 16]),
    )
    engine.runner.asynchronous = asynchronous
    together = fresh()
    for s in together:
        s.request = replace(s.request, priority=rng.choice([0, 0, 1]))
    if seed % 2:
        engine.drafter = MistakenDrafter(
            rng, {s.request.id: said for s, said in zip(together, alone, strict=True)}
        )
    got = run(engine, together)
    for s in together:
        told = [p.token_id for e in got[s.request.id] for p in e.prompt_logprobs]
        assert told == (list(s.request.prompt_ids[1:]) if s.needs_whole_prompt else [])
    assert [tokens(got[s.request.id]) for s in together] == alone
    if any(s["max_tokens"] for s in settings):
        assert any(alone)


def test_a_second_turn_finds_the_first_in_the_cache(folder: Path) -> None:
    engine = make_engine(folder)
    first = sequence(list(range(3, 40)), temperature=0, max_tokens=5)
    answer = tokens(run(engine, [first])[first.request.id])
    again = sequence([*range(3, 40), *answer, 7, 8], temperature=0, max_tokens=5)
    said = tokens(run(engine, [again])[again.request.id])
    assert again.cached_tokens == 40  # the whole blocks of 37 + 4 computed tokens
    anew = sequence([*range(3, 40), *answer, 7, 8], temperature=0, max_tokens=5)
    assert said == tokens(run(make_engine(folder), [anew])[anew.request.id])


def test_a_prefix_is_shared_with_a_running_answer(folder: Path) -> None:
    engine = make_engine(folder)
    first = sequence(list(range(3, 40)), temperature=0, max_tokens=30)
    engine.add_sequence(first)
    while len(first.token_ids) < 50:
        engine.step()
    again = sequence([*first.token_ids[:49], 7, 8], temperature=0, max_tokens=5)
    engine.add_sequence(again)
    while not again.finished:
        engine.step()
    assert not first.finished
    assert again.cached_tokens == 48
    said = again.token_ids[again.prompt_len :]
    anew = sequence([*first.token_ids[:49], 7, 8], temperature=0, max_tokens=5)
    assert said == tokens(run(make_engine(folder), [anew])[anew.request.id])


def test_the_longest_cached_prefix_is_used(folder: Path) -> None:
    engine = make_engine(folder)
    prompt = list(range(3, 60))
    for length in (20, 50, 35):
        run(engine, [sequence([*prompt[:length], 200 + length], temperature=0, max_tokens=1)])
    again = sequence(prompt, temperature=0, max_tokens=1)
    run(engine, [again])
    assert again.cached_tokens == 48
    assert (engine.scheduler.prefix_lookups, engine.scheduler.prefix_hits) == (4, 3)


def test_a_preempted_sequence_reuses_its_blocks(folder: Path) -> None:
    engine = make_engine(folder)
    s = sequence(list(range(3, 40)), temperature=0, max_tokens=12)
    engine.add_sequence(s)
    while len(s.token_ids) < 43:
        engine.step()
    engine.scheduler.preempt(s)
    assert s.computed == 0
    engine.scheduler.token_budget = 1
    engine.scheduler.schedule()
    assert s.computed == 41
    engine.cancel(s)
    engine.pool.drain_copies()
    engine.pool.check_all_free()


def test_a_long_prompt_is_chunked_while_an_answer_streams(folder: Path) -> None:
    def play() -> tuple[list[int], list[list[int]]]:
        """Return the number of prompt tokens in each step, and the tokens of both sequences."""
        engine = make_engine(folder, token_budget=128)
        policy = engine.scheduler.chunk_policy
        assert policy
        policy.max_gap_s = 0
        policy.record_step(128, 1.0)
        talks, long = (sequence(p, temperature=0, max_tokens=9) for p in ([3, 4, 5], list(range(4, 204))))
        engine.add_sequence(talks)
        engine.step()
        engine.add_sequence(long)
        chunks = []
        while engine.has_unfinished_requests:
            before = long.computed
            engine.step()
            chunks += [long.computed - before] if before < 200 and long.state else []
        return chunks, [talks.token_ids, long.token_ids]

    chunks, said = play()
    assert chunks == [64, 64, 64, 8]
    alone = [sequence(p, temperature=0, max_tokens=9) for p in ([3, 4, 5], list(range(4, 204)))]
    for s in alone:
        run(make_engine(folder), [s])
    assert said == [s.token_ids for s in alone]


def test_a_rollback_returns_to_the_prompt(folder: Path) -> None:
    engine = make_engine(folder, token_budget=16)
    prompt = list(range(3, 40))
    run(engine, [sequence(prompt, temperature=0.9, max_tokens=30)])
    again = sequence(prompt, temperature=0, max_tokens=8)
    said = tokens(run(engine, [again])[again.request.id])
    assert again.cached_tokens == 32
    anew = sequence(prompt, temperature=0, max_tokens=8)
    assert said == tokens(run(make_engine(folder), [anew])[anew.request.id])


def test_a_prompt_is_cached_before_its_answer_starts(folder: Path) -> None:
    engine = make_engine(folder)
    prompt = list(range(3, 40))
    run(engine, [sequence(prompt, max_tokens=0)])
    again = sequence([*prompt, 5], temperature=0, max_tokens=1)
    run(engine, [again])
    assert again.cached_tokens == 32


def test_cancelling_frees_everything_at_once_even_with_a_step_in_flight(folder: Path) -> None:
    engine = make_engine(folder)
    engine.runner.asynchronous = True
    gone, stays = sequence([3, 4, 5], temperature=0), sequence([3, 4, 6], temperature=0)
    engine.add_sequence(gone)
    engine.add_sequence(stays)
    engine.step()
    engine.step()
    engine.cancel(gone)
    events = []
    while engine.has_unfinished_requests:
        events += engine.step()
    assert all(event.sequence is stays for event in events)
    engine.pool.check_all_free()


def test_why_an_answer_ends(folder: Path) -> None:
    engine = make_engine(folder)
    free = sequence([3, 4, 5], temperature=0, max_tokens=8)
    said = tokens(run(engine, [free])[free.request.id])
    assert len(said) == 8
    third = said[2]
    at = said.index(third) + 1
    cases = {
        FinishReason.STOP: sequence([3, 4, 5], eos=frozenset([third]), temperature=0, max_tokens=8),
        FinishReason.LENGTH: sequence([3, 4, 5], temperature=0, max_tokens=8),
    }
    for reason, s in cases.items():
        assert run(engine, [s])[s.request.id][-1].finish_reason == reason
    by_id = sequence([3, 4, 5], temperature=0, max_tokens=8, stop_ids=(third,))
    assert tokens(run(engine, [by_id])[by_id.request.id]) == said[:at]
    ignoring = sequence([3, 4, 5], eos=frozenset([third]), temperature=0, max_tokens=8, ignore_eos=True)
    assert tokens(run(engine, [ignoring])[ignoring.request.id]) == said


@pytest.mark.quick_every(2)
def test_min_tokens_delays_the_end(folder: Path) -> None:
    """Until then, no end token and no stop id is sampled, independent of the batch."""
    asked = {"temperature": 0, "max_tokens": 12}
    free = sequence([3, 4, 5], **asked)
    said = tokens(run(make_engine(folder), [free])[free.request.id])
    for graphs in (False, True):
        engine = make_engine(folder, graphs=graphs)
        for end in said[:2]:
            by_eos = sequence([3, 4, 5], eos=frozenset([end]), min_tokens=6, **asked)
            by_id = sequence([3, 4, 5], stop_ids=(end,), min_tokens=6, **asked)
            at_end = sequence([3, 4, 5], eos=frozenset([end]), min_tokens=said.index(end), **asked)
            other = sequence([6, 4, 5], **asked)
            answers = run(engine, [by_eos, by_id, at_end, other])
            delayed = tokens(answers[by_eos.request.id])
            assert tokens(answers[by_id.request.id]) == delayed
            assert len(delayed) > 6 and end not in delayed[:6]
            assert delayed[: said.index(end)] == said[: said.index(end)]
            # The first token that min_tokens permits to end the answer does.
            assert tokens(answers[at_end.request.id]) == said[: said.index(end) + 1]
            alone = sequence([6, 4, 5], **asked)
            assert tokens(answers[other.request.id]) == tokens(run(engine, [alone])[alone.request.id])


def test_nan_logits_end_the_sequence_with_an_error_and_no_other(folder: Path) -> None:
    engine = make_engine(folder)
    engine.runner.model.embedding.weight[9] = torch.nan
    poisoned, healthy = sequence([3, 9], temperature=0.5), sequence([3, 4], temperature=0.5)
    got = run(engine, [poisoned, healthy])
    assert got[poisoned.request.id][-1].finish_reason == FinishReason.ERROR
    assert "NaN" in str(got[poisoned.request.id][-1].error)
    assert got[healthy.request.id][-1].finish_reason == FinishReason.LENGTH


def test_logprobs_are_those_of_the_whole_sequence(folder: Path) -> None:
    engine = make_engine(folder, token_budget=5)
    prompt = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
    asked = sequence(
        prompt,
        temperature=0.7,
        max_tokens=6,
        logprobs=3,
        prompt_logprobs=2,
        presence_penalty=1.5,
        logit_bias={7: 3},
    )
    events = run(engine, [asked])[asked.request.id]
    whole = engine.logits(prompt + tokens(events)).log_softmax(-1)
    of_prompt = [p for e in events for p in e.prompt_logprobs]
    of_answer = [e.logprob for e in events if e.logprob]
    assert [p.token_id for p in of_prompt] == prompt[1:]
    assert [p.token_id for p in of_answer] == tokens(events)
    for i, position in enumerate(of_prompt + of_answer):
        assert position.logprob == pytest.approx(whole[i, position.token_id].item(), abs=1e-4)
        top = whole[i].topk(len(position.top))
        assert [t for t, _ in position.top] == top.indices.tolist()
    assert {len(p.top) for p in of_prompt} == {2}
    assert {len(p.top) for p in of_answer} == {3}


def test_a_failed_pass_leaves_no_state_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions for the failed sequence may be undone, and concurrent sequences continue."""
    engine = make_engine(folder, blocks=8, aside=8)
    [alone] = run(make_engine(folder), [sequence(list(range(3, 20)), temperature=0, max_tokens=6)]).values()
    first = sequence(list(range(30, 62)), temperature=0, max_tokens=1)
    run(engine, [first])
    beside = sequence(list(range(3, 20)), temperature=0, max_tokens=6)
    engine.add_sequence(beside)
    engine.step()

    def no_memory(batch: Batch) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "launch", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.logits(list(range(100, 132)))
    assert not engine.pool.cached
    while engine.has_unfinished_requests:
        engine.step()
    assert beside.token_ids[17:] == tokens(alone)
    again = sequence(list(range(30, 62)), temperature=0, max_tokens=1)
    run(engine, [again])
    assert again.token_ids == first.token_ids
    engine.pool.check_all_free()
