"""The engine's loop on a device that lags gives the CPU's tokens, at any timing, with and without graphs:
speculation, preemption, two tiers of blocks, log probabilities, penalties, and sequences that finish together."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from localllm.plan.memory import MAX_RUNNING
from localllm.request import FinishReason, TokenLogprob
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.sequence import Sequence
from tests.lagging.device import CUDA, LaggingDevice
from tests.lagging.kernels import use_references
from tests.models.families import FAMILIES
from tests.runtime.speculation.pairs import draft_model, make_pair
from tests.runtime.speculation.test_verification import FixedDrafter
from tests.runtime.test_engine import MistakenDrafter, run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

TIMINGS = [None, 0, 1]  # None: as late as is legal
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.4, "min_tokens": 3},
    {"temperature": 0, "prompt_logprobs": 1, "logit_bias": {7: 3.0}},
]


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture
def make(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("loop")
            kind, changes = FAMILIES[family]
            make_checkpoint(folders[family], kind, **changes)
        return folders[family]

    return folder


@dataclass
class Mix:
    """A random set of sequences, and what a random engine for them is like."""

    prompts: list[list[int]]
    params: list[dict[str, Any]]
    eos: frozenset[int]
    rng: random.Random

    @classmethod
    def draw(cls, seed: int) -> Mix:
        rng = random.Random(seed)
        base = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 30))]
        prompts = [
            base[: rng.randrange(len(base) + 1)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 25))]
            for _ in range(rng.randrange(3, 5))
        ]
        length = rng.randrange(4, 10)
        params = [rng.choice(PARAMS) | {"max_tokens": rng.choice([length, rng.randrange(10)])} for _ in prompts]
        return cls(prompts, params, frozenset(rng.sample(range(320), 4)), rng)

    def sequences(self) -> list[Sequence]:
        pairs = zip(self.prompts, self.params, strict=True)
        return [sequence(prompt, 5, self.eos, **params) for prompt, params in pairs]

    def engine_options(self) -> dict[str, Any]:
        blocks = max(-(-s.max_len // 8) for s in self.sequences())
        return {
            "blocks": blocks + self.rng.randrange(0, 8),  # so few that some are preempted
            "aside": self.rng.choice([0, 12]),
            "rows": self.rng.randrange(2, 12),
            "token_budget": self.rng.choice([3, 8, 40, 512]),
            "max_running": self.rng.choice([3, 16]),
        }


def answer_twice(engine: Engine, sequences: list[Sequence], again: list[Sequence]) -> list[list[TokenEvent]]:
    """Answer, and answer again from what is in the prefix cache."""
    first = run(engine, sequences)
    second = run(engine, again)
    return [*(first[s.request.id] for s in sequences), *(second[s.request.id] for s in again)]


def check_same(got: list[TokenEvent], expected: list[TokenEvent]) -> None:
    assert tokens(got) == tokens(expected)
    ours, theirs = reported(got), reported(expected)
    assert [each and each.token_id for each in ours] == [each and each.token_id for each in theirs]
    for each, other in zip(ours, theirs, strict=True):
        if each and other:
            assert each.logprob == pytest.approx(other.logprob, abs=1e-4)
            # Of tokens that are about as likely, either may come first.
            assert [p for _, p in each.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def reported(events: list[TokenEvent]) -> list[TokenLogprob | None]:
    """Return the log probabilities of the prompt's tokens, and of the answer's."""
    return [
        *(each for e in events for each in e.prompt_logprobs),
        *(e.logprob for e in events if e.token_id is not None),
    ]


def check_mix(folder: Path, seed: int, timing: int | None, graphs: bool) -> None:
    mix = Mix.draw(seed)
    roomy = make_engine(folder)
    alone = [run(roomy, [s])[s.request.id] for s in mix.sequences()]
    with LaggingDevice(timing) as device:
        engine = make_engine(folder, device=CUDA, **mix.engine_options())
        if not graphs:
            engine.runner.graphs = None
        together, again = mix.sequences(), mix.sequences()
        for s in (*together, *again):
            s.request = replace(s.request, priority=mix.rng.choice([0, 0, 1]))
        if seed % 2:
            told = {s.request.id: tokens(a) for s, a in zip([*together, *again], alone * 2, strict=True)}
            engine.drafter = MistakenDrafter(mix.rng, told)
        got = answer_twice(engine, together, again)
        assert device.streams[0].issued > 0
    for answer, expected in zip(got, alone * 2, strict=True):
        check_same(answer, expected)


@pytest.mark.quick_every(24)
@pytest.mark.parametrize("family", ["gpt-oss", "Llama 3.x", "DeepSeek-V3", "Qwen3.5"])
@pytest.mark.parametrize("seed", [3, 0, 1, 2, 4, 5])
def test_any_mix_gives_the_tokens_of_the_cpu(make: Any, family: str, seed: int) -> None:
    check_mix(make(family), seed, TIMINGS[seed % 3], graphs=seed != 4)


def cpu_answers(folder: Path, sequences: list[Sequence]) -> list[list[int]]:
    engine = make_engine(folder)
    return [tokens(run(engine, [s])[s.request.id]) for s in sequences]


PROMPTS = (list(range(3, 20)), [7, 8, 9], [50])


def greedy(length: int = 8, **params: Any) -> list[Sequence]:
    return [sequence(prompt, temperature=0, max_tokens=length, **params) for prompt in PROMPTS]


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize(
    "params", [{"frequency_penalty": 0.5}, {"logprobs": 3, "prompt_logprobs": 2}], ids=["penalties", "logprobs"]
)
def test_a_step_waits_for_nothing_but_the_tokens_of_the_last(
    make: Any, params: dict[str, Any], graphs: bool
) -> None:
    """Sequences that begin and finish together: one wait for each step."""
    roomy = make_engine(make("Llama 3.x"))
    expected = [run(roomy, [s])[s.request.id] for s in greedy(**params)]
    with LaggingDevice() as device:
        engine = make_engine(make("Llama 3.x"), device=CUDA)
        if not graphs:
            engine.runner.graphs = None
        device.waits.clear()
        together = greedy(**params)
        got = run(engine, together)
        assert len(device.waits) == engine.steps
        assert all(wait.startswith("Event.synchronize at runtime/step.py") for wait in device.waits)
        assert not graphs or engine.runner.graphs
    for s, answer in zip(together, expected, strict=True):
        check_same(got[s.request.id], answer)


def test_a_step_is_launched_before_the_last_one_is_read(make: Any) -> None:
    with LaggingDevice() as device:
        engine = make_engine(make("Llama 3.x"), device=CUDA)
        for s in greedy(length=12):
            engine.add_sequence(s)
        for _ in range(4):
            engine.step()
        stream = device.streams[0]
        unread = stream.issued - stream.done
        assert engine.in_flight and unread > 0
        while engine.has_unfinished_requests:
            engine.step()


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("timing", [None, 3])
def test_preempted_sequences_continue(make: Any, timing: int | None) -> None:
    folder = make("Llama 3.x")
    expected = cpu_answers(folder, greedy(length=20))
    with LaggingDevice(timing):
        engine = make_engine(folder, device=CUDA, blocks=6, aside=4)
        together = greedy(length=20)
        got = run(engine, together)
        assert engine.scheduler.preemptions > 0
    assert [tokens(got[s.request.id]) for s in together] == expected


def test_a_cancelled_sequence_leaves_its_slot_and_blocks_to_the_next(make: Any) -> None:
    """The step that computes it is in flight."""
    folder = make("Llama 3.x")
    expected = cpu_answers(folder, greedy())
    with LaggingDevice():
        engine = make_engine(folder, device=CUDA, blocks=5, max_running=1)
        for s, answer in zip(greedy(), expected, strict=True):
            victim = sequence([9, 9, 9, 9], temperature=0, max_tokens=30)
            engine.add_sequence(victim)
            engine.step()
            engine.step()
            engine.cancel(victim)
            engine.add_sequence(s)
            events = []
            while engine.has_unfinished_requests:
                events += engine.step()
            assert all(event.sequence is s for event in events)
            assert tokens(events) == answer


class Drafting(FixedDrafter):
    """Says that it will draft, so that the last token is read before the next step."""

    def may_draft(self, sequence: Sequence) -> bool:
        return True


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_drafts_are_verified(make: Any, graphs: bool) -> None:
    folder = make("Llama 3.x")
    [expected] = cpu_answers(folder, [sequence([3, 4, 5], temperature=0, max_tokens=20)])
    wrong = [token if index % 6 else (token + 1) % 320 for index, token in enumerate(expected)]
    with LaggingDevice():
        engine = make_engine(folder, device=CUDA)
        if not graphs:
            engine.runner.graphs = None
        told = engine.drafter = Drafting(wrong, most=3)
        [events] = run(engine, [sequence([3, 4, 5], temperature=0, max_tokens=20)]).values()
        assert not graphs or {key.count for key in engine.runner.graphs.captured} >= {1, 4}
    assert tokens(events) == expected and 3 in told.accepted


@pytest.mark.slow
@pytest.mark.parametrize(("family", "timing"), [("Llama 3.x", None), ("Llama 3.x", 0), ("Qwen3.5", 1)])
def test_a_draft_model_on_the_device(tmp_path: Path, family: str, timing: int | None) -> None:
    target, draft = make_pair(tmp_path, family, 0.05)
    params: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 0, "logprobs": 1}]

    def sequences() -> list[Sequence]:
        drafted = [sequence(p, 5, max_tokens=14, **each) for p, each in zip(PROMPTS, params, strict=True)]
        for s in drafted:  # with a seed, drafts change no token
            s.request = replace(s.request, params=replace(s.request.params, seed=5))
        return drafted

    expected = cpu_answers(target, sequences())
    with LaggingDevice(timing):
        engine = make_engine(target, device=CUDA)
        engine.drafter = draft_model(draft, device=CUDA)
        together = sequences()
        got = run(engine, together)
        assert engine.accepted_tokens > 0
    assert [tokens(got[s.request.id]) for s in together] == expected


def test_a_model_that_computes_nan_ends_its_answer(make: Any) -> None:
    """The error value passes through the captured steps until the host reads it."""
    with LaggingDevice():
        engine = make_engine(make("Llama 3.x"), device=CUDA)
        run(engine, greedy(length=2))
        engine.runner.model.norm.weight.fill_(float("nan"))
        got = run(engine, greedy(length=6))
    assert {answer[-1].finish_reason for answer in got.values()} == {FinishReason.ERROR}


@pytest.mark.slow
@pytest.mark.parametrize("timing", [None, 0])
def test_kernels_of_triton_that_run_late(make: Any, monkeypatch: pytest.MonkeyPatch, timing: int | None) -> None:
    """Those that are launched for a GPU, under Triton's interpreter, in captured steps too."""
    folder = make("Llama 3.x")
    expected = cpu_answers(folder, greedy(length=4))
    monkeypatch.undo()  # the references
    with LaggingDevice(timing):
        engine = make_engine(folder, device=CUDA)
        together = greedy(length=4)
        got = run(engine, together)
        assert engine.runner.graphs and engine.runner.graphs.captured
    assert [tokens(got[s.request.id]) for s in together] == expected


@pytest.mark.slow
def test_as_many_sequences_as_run_at_once(make: Any) -> None:
    """Steps of more tokens than a graph has, and of fewer while they finish."""
    folder = make("Llama 3.x")

    def answers() -> list[Sequence]:
        lengths = ((i, 2 + i % 3) for i in range(MAX_RUNNING["cuda"]))
        return [sequence([3 + i, 7], temperature=0, max_tokens=length) for i, length in lengths]

    roomy = make_engine(folder, blocks=600, max_running=16)
    alone = answers()
    got = run(roomy, alone)
    expected = [tokens(got[s.request.id]) for s in alone]
    with LaggingDevice():
        engine = make_engine(folder, device=CUDA, blocks=600, max_running=MAX_RUNNING["cuda"])
        together = answers()
        got = run(engine, together)
        graphs = engine.runner.graphs
        assert graphs and any(key.bucket > 32 for key in graphs.captured)
    assert [tokens(got[s.request.id]) for s in together] == expected
