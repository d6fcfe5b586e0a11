"""The loop over static buffers with torch's kernels; nothing is captured here."""

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path

import pytest
import torch

from localllm.request import SamplingParams
from localllm.runtime import cuda_graphs
from localllm.runtime.batch import upload_into
from localllm.runtime.engine import Engine
from localllm.runtime.gpu_sampler import variant_of
from localllm.runtime.kernels.registry import KERNELS
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.sampler import MaskProvider, SamplingSpec
from localllm.runtime.sequence import Sequence
from localllm.runtime.step import Step
from tests.models.families import FAMILIES
from tests.runtime.speculation.test_verification import FixedDrafter
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

OPERATIONS = ("attention", "latent_attention")


@pytest.fixture(autouse=True)
def from_the_block_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only references, which read device buffers like GPU kernels; other kernels work sequence by sequence."""
    for operation in OPERATIONS:
        monkeypatch.setitem(KERNELS, operation, KERNELS[operation][-1:])


@pytest.fixture(autouse=True)
def where_the_last_step_left_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the logits of every step to the same memory, like a replay."""
    capture = cuda_graphs.CudaGraphs.capture

    def captured(self: cuda_graphs.CudaGraphs, key: cuda_graphs.GraphKey) -> Callable[[], cuda_graphs.GraphOutput]:
        run, places = capture(self, key), []

        def replay() -> cuda_graphs.GraphOutput:
            found = run()
            if found.logits is None:
                return found
            places.append(found.logits)
            return cuda_graphs.GraphOutput(found.sampled_ids, places[0].copy_(found.logits))

        return replay

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "capture", captured)


@pytest.fixture(scope="module", params=["Llama 3.x", "DeepSeek-V3", "Gemma 4, all at once"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs")
    kind, changes = FAMILIES[request.param]
    make_checkpoint(path, kind, **changes)
    return path


def captured(engine: Engine) -> int:
    assert engine.runner.graphs, engine.runner.no_graphs_reason
    return len(engine.runner.graphs.captured)


@pytest.mark.quick_every(11)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_any_mix_gives_each_sequence_the_tokens_it_gets_alone_without_graphs(
    folder: Path, seed: int, asynchronous: bool
) -> None:
    rng = random.Random(seed)
    base = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 30))]
    prompts = [[*base[: rng.randrange(len(base) + 1)], rng.randrange(3, 300)] for _ in range(rng.randrange(2, 6))]
    choices = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 0.4, "logit_bias": {7: 3.0}},
    ]
    asked = [rng.choice(choices) | {"max_tokens": rng.randrange(1, 16)} for _ in prompts]

    def fresh() -> list[Sequence]:
        return [sequence(p, seed, frozenset([5, 6]), **a) for p, a in zip(prompts, asked, strict=True)]

    roomy = make_engine(folder)
    alone = [run(roomy, [s])[s.request.id] for s in fresh()]
    need = max(-(-s.max_len // 8) for s in fresh())
    engine = make_engine(folder, blocks=need + rng.randrange(12), token_budget=rng.choice([3, 40]), graphs=True)
    engine.runner.asynchronous = asynchronous
    together = fresh()
    got = run(engine, together)
    for s, expected in zip(together, alone, strict=True):
        assert tokens(got[s.request.id]) == tokens(expected)
        for event, other in zip(got[s.request.id], expected, strict=True):
            assert (event.logprob is None) == (other.logprob is None)
            if event.logprob and other.logprob:
                assert event.logprob.top[0][0] == other.logprob.top[0][0]
                assert event.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
    assert captured(engine) > 0


@pytest.mark.quick_every(2)
def test_log_probabilities_belong_to_their_own_step(folder: Path) -> None:
    engine, plain = make_engine(folder, graphs=True), make_engine(folder)
    engine.runner.asynchronous = True
    asked = {"temperature": 0, "logprobs": 1, "max_tokens": 8}
    [events] = run(engine, [sequence([3, 4, 5], **asked)]).values()
    [expected] = run(plain, [sequence([3, 4, 5], **asked)]).values()
    assert [e.logprob.top[0][0] for e in events if e.logprob] == tokens(expected)
    assert captured(engine) == 1


@pytest.mark.quick_every(2)
def test_a_step_that_the_device_knows_is_not_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, graphs=True)
    engine.runner.asynchronous = True
    sent: list[object] = []
    assert engine.runner.graphs
    inputs = engine.runner.graphs.inputs
    engine.add_sequence(sequence(list(range(3, 12)), temperature=0, max_tokens=12))

    def noted(target: torch.Tensor, values: torch.Tensor) -> None:
        sent.append(values)
        upload_into(target, values)

    monkeypatch.setattr(cuda_graphs, "upload_into", noted)
    steps = []
    while engine.has_unfinished_requests:
        sent.clear()
        engine.step()
        steps.append(len(sent))
    # The prompt; the first token, and its blocks; then one block of 8 more at token 16, and what is not launched.
    assert steps[0] == 0 and steps[1] == 2
    assert sum(steps[2:]) == 1
    assert inputs is engine.runner.graphs.inputs


def test_steps_of_many_tokens_run_kernel_by_kernel(folder: Path) -> None:
    engine = make_engine(folder, graphs=True)
    run(engine, [sequence(list(range(3, 40)), temperature=0, max_tokens=1)])
    assert captured(engine) == 0


def test_a_step_of_so_many_tokens_that_weights_are_unpacked_is_not_captured(folder: Path) -> None:
    found = make_engine(folder, graphs=True).runner.graphs
    assert found
    ids = list(range(16))
    states = [SequenceState(BlockPool(64, 8)) for _ in range(8)]
    draws = [SamplingSpec(SamplingParams(temperature=0), 0, i, ids, Counter()) for i in ids]
    for many, taken in ((4, True), (5, False), (8, False)):
        step = Step(states[:many], [ids] * many, list(range(16 * many)), draws * many, list(range(many)), [])
        assert isinstance(found.key_of(step), cuda_graphs.GraphKey) == taken


def test_several_drafts_whose_tokens_are_counted_are_drawn_on_the_host(folder: Path) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    kind = variant_of([SamplingSpec(params, 0, i, [3, 4], Counter(), history_slot=2) for i in range(2)], 320)
    assert kind.unsupported_reason and "several" in kind.unsupported_reason
    assert not variant_of(
        [SamplingSpec(params, 0, 1, [3, 4], Counter(), history_slot=i) for i in range(2)], 320
    ).unsupported_reason


def test_only_tokens_that_the_device_does_not_count_are_read_before_the_next_step(folder: Path) -> None:
    def must_read(graphs: bool, other: Sequence | None = None) -> bool:
        engine = make_engine(folder, graphs=graphs)
        engine.runner.asynchronous = True
        engine.add_sequence(sequence([3, 4, 5], temperature=0, repetition_penalty=1.3))
        engine.step()
        if other:
            engine.add_sequence(other)
        return engine.must_commit_first()

    assert must_read(graphs=False) and not must_read(graphs=True)
    assert not must_read(graphs=True, other=sequence([3, 4, 6], temperature=0))
    assert must_read(graphs=True, other=sequence([3, 4, 6], logit_bias=dict.fromkeys(range(1100), 1.0)))
    assert must_read(graphs=True, other=sequence([3, 4, 6], eos=frozenset(range(100)), min_tokens=2))
    constrained = sequence([3, 4, 6], temperature=0)
    constrained.constraint = Unconstrained()
    assert must_read(graphs=True, other=constrained)


class Unconstrained:
    """A grammar that permits every token."""

    cut = finished = False
    fault = None

    def begin(self, drafts: ListLike[int]) -> MaskProvider:
        return lambda: [None] * (1 + len(drafts))

    def advance(self, token_id: int) -> None:
        pass

    def forced(self, most: int) -> list[int]:
        return []

    def allowed(self, drafts: ListLike[int]) -> list[int]:
        return list(drafts)


PENALIZED = {"temperature": 0, "frequency_penalty": 2.0, "logit_bias": dict.fromkeys((7, 9, 11), 40.0)}


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("has_grammar", [True, False], ids=["grammar", "many end tokens"])
def test_a_step_that_moves_to_the_host_counts_the_newest_token(
    folder: Path, has_grammar: bool, cancelled: bool
) -> None:
    """Another request, which cannot be sampled on the device, joins a sequence with penalties, and may leave again
    while its step is in flight."""
    [expected] = run(make_engine(folder), [sequence([3, 4, 5], max_tokens=9, **PENALIZED)]).values()
    for begin in range(1, 5):
        engine = make_engine(folder, graphs=True)
        engine.runner.asynchronous = True
        penalized = sequence([3, 4, 5], max_tokens=9, **PENALIZED)
        other = sequence([8, 9, 10], temperature=0, max_tokens=3)
        if has_grammar:
            other.constraint = Unconstrained()
        else:
            other = sequence([8, 9, 10], eos=frozenset(range(100)), temperature=0, max_tokens=9, min_tokens=9)
        engine.add_sequence(penalized)
        said: list[int] = []
        while engine.has_unfinished_requests:
            if engine.steps == begin:
                engine.add_sequence(other)
            if cancelled and engine.steps == begin + 1:
                engine.cancel(other)
            events = engine.step()
            said += [e.token_id for e in events if e.sequence is penalized and e.token_id is not None]
        assert said == tokens(expected)


@pytest.mark.quick_every(2)
def test_several_tokens_of_each_are_one_launch(folder: Path) -> None:
    """Steps that verify draft tokens have this shape."""
    engine, plain = make_engine(folder, graphs=True), make_engine(folder)
    ids = list(range(3, 31))
    expected = plain.logits(ids)
    state = SequenceState(engine.pool)
    for begin in range(0, 28, 4):
        state.extend(4)
        piece = ids[begin : begin + 4]
        draws = [SamplingSpec(SamplingParams(temperature=0), 0, begin + i + 1, ids, Counter()) for i in range(4)]
        step = Step([state], [piece], list(range(4)), draws, [0], [], keep_logits=True)
        drawn = engine.runner.run(step)
        torch.testing.assert_close(drawn.logits, expected[begin : begin + 4], atol=1e-4, rtol=1e-4)
        assert drawn.results.wait()[0].tolist() == expected[begin : begin + 4].argmax(-1).tolist()
    state.free()
    assert captured(engine) == 1


@pytest.mark.quick_every(2)
def test_drafts_are_verified_in_one_launch_and_change_nothing(folder: Path) -> None:
    asked = {"temperature": 0, "max_tokens": 20}
    [expected] = map(tokens, run(make_engine(folder), [sequence([3, 4, 5], **asked)]).values())
    engine = make_engine(folder, graphs=True)
    wrong = [token if place % 6 else (token + 1) % 320 for place, token in enumerate(expected)]
    told = engine.drafter = FixedDrafter(wrong, most=3)
    [answer] = run(engine, [sequence([3, 4, 5], **asked)]).values()
    assert tokens(answer) == expected
    assert len(set(told.accepted)) > 1 and 3 in told.accepted
    assert {key.count for key in engine.runner.graphs.captured} >= {1, 4}


@pytest.mark.parametrize(("family", "widths"), [("Qwen3", cuda_graphs.QUERY_LENS), ("Qwen3.5", ())])
def test_drafts_are_filled_up_only_where_their_step_can_be_captured(
    tmp_path: Path, family: str, widths: tuple[int, ...]
) -> None:
    """A recurrent state is saved before each of them."""
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    assert make_engine(tmp_path, graphs=True).runner.captured_widths(1) == widths


def test_a_model_with_a_per_sequence_kernel_declines_capture(tmp_path: Path) -> None:
    kind, changes = FAMILIES["LFM2"]
    make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path, graphs=True)
    [answer] = run(engine, [sequence([3, 4, 5], temperature=0, max_tokens=4)]).values()
    [expected] = run(make_engine(tmp_path), [sequence([3, 4, 5], temperature=0, max_tokens=4)]).values()
    assert tokens(answer) == tokens(expected)
    assert engine.runner.graphs is None and "sequence by sequence" in engine.runner.no_graphs_reason


@pytest.mark.quick_every(2)
def test_without_memory_to_capture_a_step_runs_kernel_by_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later graphs are still captured."""
    engine, plain = make_engine(folder, graphs=True), make_engine(folder)
    launch = cuda_graphs.CudaGraphs.run
    tried: list[int] = []

    def run_out(self: cuda_graphs.CudaGraphs, key: cuda_graphs.GraphKey) -> cuda_graphs.GraphOutput:
        tried.append(key.bucket)
        if key.bucket > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(self, key)

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "run", run_out)
    long, short = ({"temperature": 0, "max_tokens": count} for count in (8, 4))
    got = run(engine, [sequence([3, 4, 5], **long), sequence([6, 7], **short)])
    expected = run(plain, [sequence([3, 4, 5], **long), sequence([6, 7], **short)])
    assert list(map(tokens, got.values())) == list(map(tokens, expected.values()))
    assert tried.count(2) == 1 and tried.count(1) > 2
    assert engine.runner.graphs


@pytest.mark.quick_every(2)
def test_the_host_copy_equals_the_device_buffers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers copies that fail because no memory can be pinned."""

    def no_memory(target: torch.Tensor, values: torch.Tensor) -> None:
        raise MemoryError

    engine = make_engine(folder, graphs=True)
    run(engine, [sequence([3, 4, 5], temperature=0, max_tokens=8)])
    found = engine.runner.graphs
    assert found and found.host_inputs == found.inputs.tolist()
    monkeypatch.setattr(cuda_graphs, "upload_into", no_memory)
    with pytest.raises(MemoryError):
        found.upload_inputs(found.padding_inputs())
    assert found.host_inputs == found.inputs.tolist() != found.padding_inputs()
