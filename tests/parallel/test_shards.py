"""Every family and every packed format, divided among ranks, has the logits of one process or is refused by name.

The bound is twice the error that one process has: float32 against transformers in float64.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.arch.describe import parse_config
from localllm.arch.shard import Shard
from localllm.arch.stages import Position
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import part_of_model, shard_model
from localllm.checkpoint.tensors import Weights
from localllm.errors import UnsupportedModel
from localllm.parallel.steps import StepDecoder, StepEncoder
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.kv_cache.sequence_state import NO_COPIES, BlockPool, SequenceState
from localllm.runtime.weight_loader import CpuCopier, WeightLoader
from tests.checkpoint.published import LAYOUTS, W8A8, write
from tests.models.families import FAMILIES, NOT_IN_GGUF, OTHERWISE_IN_GGUF
from tests.models.proofs import logits_of_transformers, token_ids
from tests.parallel.ranks_in_threads import DIVISIONS, RanksInThreads
from tests.runtime.test_engine import MistakenDrafter, run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine

IDS = token_ids(70)
REFUSED = {"Gemma 4, like 31B": "a model with 3 key and value heads cannot be divided"}
WITH_TWO_HEADS = FAMILIES["Gemma 4, like 31B"][1] | {"num_global_key_value_heads": 2}
DIVIDED = {name: family for name, family in FAMILIES.items() if name not in REFUSED}
DIVIDED["Gemma 4, like 31B, with two heads"] = ("Gemma4", WITH_TWO_HEADS)
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4}
NOT_FOUR = {name for name in FAMILIES if name.startswith("Phi-4")} | {"Llama 2"}  # whose sizes exclude 8 heads
PACKED_SIZES = {
    "num_attention_heads": 8,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "hidden_size": 128,
}
NOT_DIVIDED = {
    "float-quantized, blocks": "256 rows are stored in groups of 24",
    "fp8, blocks": "256 columns are stored in groups of 40",
}


def exact_logits(model: Any) -> Tensor:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default has no float64
    return logits_of_transformers(model.double(), IDS)


def errors(path: Path, size: int, exact: Tensor, **options: Any) -> tuple[float, float]:
    """Return the largest errors of one process and of several. options: of RanksInThreads"""
    alone = make_engine(path, context=len(IDS)).logits(IDS)
    with torch.inference_mode(), RanksInThreads(path, size, context=len(IDS), **options) as together:
        divided = together.engine.logits(IDS)
        together.engine.pool.check_invariants()
    assert exact.std() > 0.3  # a dead model would agree with anything
    return tuple((logits.double() - exact).abs().max().item() for logits in (alone, divided))  # type: ignore


def check(path: Path, size: int, model: Any, **options: Any) -> None:
    alone, divided = errors(path, size, exact_logits(model), **options)
    assert divided <= 2 * alone


@pytest.mark.quick_every(9)
@pytest.mark.parametrize("family", DIVIDED)
@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_every_family(tmp_path: Path, family: str, size: int) -> None:
    kind, changes = DIVIDED[family]
    if size == 4 and family in NOT_FOUR:
        pytest.skip("its sizes exclude 8 heads")
    if size == 4:
        own = {key: value for key, value in FOUR.items() if key not in changes or key.startswith("linear")}
        changes = changes | {key: value for key, value in own.items() if key in changes or "linear" not in key}
    check(tmp_path, size, make_checkpoint(tmp_path, kind, **changes))


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("family", [name for name in DIVIDED if name not in NOT_IN_GGUF])
def test_logits_of_every_family_in_gguf(tmp_path: Path, family: str) -> None:
    from tests.gguf_writer import write_gguf

    kind, changes = DIVIDED[family]
    model = make_checkpoint(tmp_path, kind, **changes | OTHERWISE_IN_GGUF.get(family, {}))
    write_gguf(tmp_path, tmp_path / "model.gguf")
    check(tmp_path / "model.gguf", 2, model)


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in NOT_DIVIDED])
def test_logits_of_every_packed_layout(tmp_path: Path, layout: str) -> None:
    check(tmp_path, 2, write(tmp_path, *LAYOUTS[layout], "Llama", **PACKED_SIZES))


EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
MIXTURES = [name for name, (_, changes) in DIVIDED.items() if any(key in changes for key in EXPERT_COUNTS)]


def with_experts(changes: dict[str, Any], count: int) -> dict[str, Any]:
    return changes | {key: count for key in EXPERT_COUNTS if key in changes}


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("shares", [(), (1.0, 1.0)], ids=["ranks", "ranks of stages"])
def test_logits_of_whole_experts(tmp_path: Path, family: str, shares: tuple[float, ...]) -> None:
    kind, changes = FAMILIES[family]
    model = make_checkpoint(tmp_path, kind, **with_experts(changes, 8))
    check(tmp_path, 2, model, whole_experts=True, shares=shares)


def test_each_expert_is_read_by_one_rank(tmp_path: Path) -> None:
    kind, changes = FAMILIES["gpt-oss"]
    make_checkpoint(tmp_path, kind, **with_experts(changes, 8))
    header = read_header(tmp_path)
    names: list[set[str]] = []
    for rank in range(2):
        part, _ = shard_model(header, parse_config(header.config), Shard(rank, 2, whole_experts=True))
        names.append({name for name in part.tensors if ".experts." in name})
        assert all(part.tensors[name] == header.tensors[name] for name in names[-1])
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name in header.tensors if ".experts." in name}


def test_models_without_enough_experts_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    assert "this model has no experts to divide" in refusal(tmp_path, 2, whole_experts=True)
    kind, changes = FAMILIES["Mixtral"]
    make_checkpoint(tmp_path, kind, **with_experts(changes, 5))
    assert "a model with 5 experts cannot be divided" in refusal(tmp_path, 2, whole_experts=True)


def refusal(path: Path, size: int, *, whole_experts: bool = False) -> str:
    header = read_header(path)
    with pytest.raises(UnsupportedModel) as caught:
        part_of_model(header, parse_config(header.config), Position(0, size, (), whole_experts))
    return str(caught.value)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_divided_is_refused(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    assert REFUSED[family] in refusal(tmp_path, 2)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("layout", NOT_DIVIDED)
def test_a_layout_that_cannot_be_divided_is_refused(tmp_path: Path, layout: str) -> None:
    write(tmp_path, *LAYOUTS[layout], "Llama", **PACKED_SIZES)
    assert NOT_DIVIDED[layout] in refusal(tmp_path, 2)


def test_numbers_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    assert refusal(tmp_path, 4).startswith("a model with 6 attention heads cannot be divided among 4 processes")
    assert refusal(tmp_path, 3).startswith("a model with 2 key and value heads cannot be divided")


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("block_format", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("by_rows", [False, True], ids=["at borders of blocks", "by rows alone"])
def test_blocks_of_gguf_are_divided(tmp_path: Path, block_format: str, by_rows: bool) -> None:
    from gguf import GGMLQuantizationType as Kind

    from tests.gguf_writer import write_gguf

    sizes = PACKED_SIZES | ({"intermediate_size": 32 * 3, "head_dim": 12} if by_rows else {})
    model = make_checkpoint(tmp_path, "Llama", **sizes)
    float32_error, _ = errors(tmp_path, 2, exact_logits(model))
    file, exact = tmp_path / "model.gguf", tmp_path / "exact.gguf"
    write_gguf(tmp_path, file, Kind[block_format])
    write_gguf(tmp_path, exact, Kind[block_format], dequantized=True)
    _, divided = errors(file, 2, make_engine(exact).logits(IDS).double())
    assert divided <= 2 * float32_error
    header = read_header(file)
    assert part_of_model(header, parse_config(header.config), Position(0, 2))[0].by_rows == by_rows


def test_blocks_of_experts_are_divided_at_their_borders_only(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType as Kind

    from tests.gguf_writer import write_gguf

    kind, changes = FAMILIES["Mixtral"]
    make_checkpoint(tmp_path, kind, **changes | PACKED_SIZES | {"intermediate_size": 32 * 3})
    write_gguf(tmp_path, tmp_path / "model.gguf", Kind.Q8_0)
    assert "96 columns are stored in blocks of 32" in refusal(tmp_path / "model.gguf", 2)


@pytest.mark.slow
def test_experts_that_cannot_be_divided_stay_whole(tmp_path: Path) -> None:
    sizes = PACKED_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = write(tmp_path, *LAYOUTS["gptq, desc_act"], "Mixtral", **sizes)
    assert "stored in another order" in refusal(tmp_path, 2)
    check(tmp_path, 2, model, whole_experts=True)


@pytest.mark.parametrize("size", [2, 4])
def test_products_of_8_bit_activations_have_the_bits_of_one_process(tmp_path: Path, size: int) -> None:
    write(tmp_path, *W8A8, "Llama", **PACKED_SIZES)
    with torch.inference_mode(), RanksInThreads(tmp_path, size, context=len(IDS)) as together:
        logits = together.engine.logits(IDS)
    expected = make_engine(tmp_path, context=len(IDS)).logits(IDS)
    assert expected.std() > 0.3
    assert torch.equal(logits, expected)


def test_each_rank_reads_its_part_and_what_is_shared(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3", num_attention_heads=8, num_key_value_heads=4)
    header = read_header(tmp_path)
    shared = sum(tensor.nbytes for name, tensor in header.tensors.items() if "norm" in name)
    shared += sum(
        tensor.nbytes
        for name, tensor in header.tensors.items()
        if name.endswith(("before_mixer.weight", "before_ffn.weight"))
    )
    for size in (2, 4):
        with RanksInThreads(tmp_path, size) as together:
            assert all(read <= (header.stored_bytes - shared) / size + shared for read in together.read_bytes)


def test_the_plan_is_that_of_one_rank(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3", num_attention_heads=8, num_key_value_heads=4)
    header, free = read_header(tmp_path), FreeMemory("cpu", 2**30)
    one, two = (check_fit(header, free, LoadOptions(tensor_parallel=size), name="model").needs for size in (1, 2))
    assert two.block_bytes == one.block_bytes / 2
    with RanksInThreads(tmp_path, 2) as together:
        assert abs(two.weights.total - max(together.read_bytes)) <= 0.03 * two.weights.total


@pytest.mark.parametrize("family", ["gpt-oss", "Phi-3"])
def test_a_gpu_reads_the_parts_that_a_cpu_maps(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    whole = read_header(tmp_path)
    for rank in range(2):
        header, _ = shard_model(whole, parse_config(whole.config), Shard(rank, 2))
        mapped = Weights(header)
        with WeightLoader(header.tensors, CpuCopier(), 1000, 20_000) as loader:
            for tensor in header.tensors.values():
                assert torch.equal(loader.read(tensor), mapped.read(tensor))


def answers(engine: Engine, known: list[list[int]] | None = None) -> list[list[int]]:
    """Return the greedy tokens of sequences with a common beginning, some of which are penalized. known: their
    tokens, of which some are drafted, with mistakes."""
    count = 6
    prompts = [IDS[: 3 + 7 * index] for index in range(count)]
    penalties = [1.3 if index % 3 == 1 else 1.0 for index in range(count)]
    asked = [
        sequence(prompt, temperature=0, max_tokens=20, repetition_penalty=penalty)
        for prompt, penalty in zip(prompts, penalties, strict=True)
    ]
    if known:
        told = {one.request.id: ids for one, ids in zip(asked, known, strict=True)}
        engine.drafter = MistakenDrafter(random.Random(0), told)
    steps, step = itertools.count(), engine.step

    def step_or_preempt() -> list[TokenEvent]:
        return (engine.preempt_all() if next(steps) == 6 else []) + step()

    engine.step = step_or_preempt
    events = run(engine, asked)
    return [tokens(events[one.request.id]) for one in asked]


@pytest.mark.quick_every(14)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "DeepSeek-V3", "LFM2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["read at once", "one step ahead"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_preempted_and_drafted_sequences_have_their_tokens(
    tmp_path: Path, family: str, asynchronous: bool, division: str
) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    alone = answers(make_engine(tmp_path))
    for known in (None, alone):
        ranks = RanksInThreads(tmp_path, **DIVISIONS[division], blocks=14, token_budget=9)
        with torch.inference_mode(), ranks as together:
            together.engine.runner.asynchronous = asynchronous
            assert answers(together.engine, known) == alone
            assert (together.engine.accepted_tokens > 0) == (known is not None)


def test_hidden_states_are_those_of_one_process(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3")

    def hidden(engine: Engine) -> Tensor:
        state = SequenceState(engine.pool)
        state.extend(len(IDS))
        batch = engine.runner.make_batch([state], [IDS], [], hidden=True)
        return engine.runner.hidden_states(batch)

    with torch.inference_mode(), RanksInThreads(tmp_path, 2) as together:
        torch.testing.assert_close(hidden(together.engine), hidden(make_engine(tmp_path)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_a_step_is_received_as_it_was_sent(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(4000, 4, 4000 if seed % 2 else 0)
    states, encoder, decoder = [SequenceState(pool) for _ in range(6)], StepEncoder(1 + seed % 3), StepDecoder()
    for _ in range(200):
        chosen, counts = rng.sample(states, rng.randrange(1, 6)), []
        for index, state in enumerate(chosen):
            if rng.random() < 0.3:
                state.rollback(rng.randrange(state.length + 1))
            if rng.random() < 0.1:
                fork = state.fork()
                state.free()
                states[states.index(state)] = chosen[index] = state = fork
            count = rng.randrange(1, 6)
            state.extend(count)
            state.plan_saves(count, 0, [])
            counts.append(count)
        ids = [[rng.randrange(1000) for _ in range(count)] for count in counts]
        index = rng.sample(range(sum(counts)), rng.randrange(sum(counts)))
        hidden, copies = rng.random() < 0.5, pool.drain_copies()
        message = encoder.encode(chosen, ids, index, copies, hidden=hidden, has_unread=False)
        step = decoder.decode(message)
        assert (step.token_ids, step.logit_index, step.copies, step.hidden) == (ids, index, copies, hidden)
        for sent, received in zip(chosen, step.states, strict=True):
            for name in ("block_table", "length", "state_slot", "state_saves", "end_of_step_copies"):
                assert getattr(received, name) == getattr(sent, name)


def test_a_decode_step_is_as_small_whatever_its_context() -> None:
    pool, encoder = BlockPool(3000, 16), StepEncoder()
    sizes = []
    for length in (16, 32_000):
        state = SequenceState(pool)
        state.extend(length)
        for _ in range(2):
            state.extend(1)
            sizes.append(len(encoder.encode([state], [[7]], [0], NO_COPIES, hidden=False, has_unread=False)))
    assert sizes[1] == sizes[3] <= 64 < sizes[2]
