"""Every family and every packed format, in pipeline stages, has the bits of one process."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.arch.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from localllm.arch.describe import parse_config
from localllm.arch.stages import Position, divide_layers, parse_shares, stages_between
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import divide_model, part_of_model
from localllm.errors import UnsupportedModel, UsageError
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import SequenceState
from tests.checkpoint.published import LAYOUTS, write
from tests.models.families import FAMILIES, NOT_IN_GGUF, OTHERWISE_IN_GGUF
from tests.models.proofs import token_ids
from tests.parallel.ranks_in_threads import RanksInThreads
from tests.parallel.test_shards import PACKED_SIZES, check
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine

IDS = token_ids(70)
EQUAL = (1.0, 1.0)
FEW_STAGES = {"Gemma 4, like E2B": 2, "Gemma 4, all at once": 2}  # layers that share keys stay together


def check_bits(path: Path, shares: tuple[float, ...], dtype: torch.dtype = torch.float32) -> None:
    alone = make_engine(path, dtype, context=len(IDS))
    with torch.inference_mode(), RanksInThreads(path, 1, dtype, context=len(IDS), shares=shares) as stages:
        assert len(stages.ranks) == len(shares)
        logits = stages.engine.logits(IDS)
        decoding = [stages.engine.logits(IDS[:count]) for count in (1, 3)]
        stages.engine.pool.check_invariants()
    assert logits.std() > 0.1  # a dead model would agree with anything
    assert torch.equal(logits, alone.logits(IDS))
    for count, result in zip((1, 3), decoding, strict=True):
        assert torch.equal(result, alone.logits(IDS[:count]))


@pytest.mark.quick_every(9)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3])
def test_logits_of_every_family(tmp_path: Path, family: str, count: int) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    if count > FEW_STAGES.get(family, count):
        pytest.skip("its layers share keys and values")
    check_bits(tmp_path, (1.0,) * count)


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_IN_GGUF])
def test_logits_of_every_family_in_gguf(tmp_path: Path, family: str) -> None:
    from tests.gguf_writer import write_gguf

    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes | OTHERWISE_IN_GGUF.get(family, {}))
    write_gguf(tmp_path, tmp_path / "model.gguf")
    check_bits(tmp_path / "model.gguf", EQUAL)


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_every_packed_layout(tmp_path: Path, layout: str) -> None:
    write(tmp_path, *LAYOUTS[layout], "Llama", **PACKED_SIZES)
    check_bits(tmp_path, (2.0, 1.0))


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("name", ["f16", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "iq4_xs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_published_gguf_files(name: str, dtype: torch.dtype) -> None:
    check_bits(shared(f"gguf/model-{name}.gguf"), EQUAL, dtype)


def test_logits_of_a_trained_model_in_four_stages() -> None:
    check_bits(shared("stories260K"), (3.0, 1.0, 1.0, 1.0))


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "gpt-oss"])
def test_stages_of_divided_layers_are_as_accurate(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    check(tmp_path, 2, make_checkpoint(tmp_path, kind, **changes), shares=EQUAL)


def test_hidden_states_are_those_of_one_process(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3")

    def hidden(engine: Engine) -> torch.Tensor:
        state = SequenceState(engine.pool)
        state.extend(len(IDS))
        return engine.runner.hidden_states(engine.runner.make_batch([state], [IDS], [], hidden=True))

    with torch.inference_mode(), RanksInThreads(tmp_path, 1, shares=EQUAL) as stages:
        assert torch.equal(hidden(stages.engine), hidden(make_engine(tmp_path)))


@pytest.mark.parametrize("tied", [True, False])
def test_each_tensor_is_read_by_one_stage(tmp_path: Path, tied: bool) -> None:
    make_checkpoint(tmp_path, "Llama", tie_word_embeddings=tied)
    header = read_header(tmp_path)
    with RanksInThreads(tmp_path, 1, shares=(1.0, 1.0, 1.0)) as stages:
        assert all(stages.read_bytes)
        assert sum(stages.read_bytes) == header.stored_bytes


def config_of(count: int, sources: dict[int, int]) -> ModelConfig:
    """Return a configuration whose layers differ in nothing but the layer whose keys and values they read."""
    attention = AttentionConfig(heads=1, kv_heads=1, head_dim=8, rope=None, scale=1.0)
    mixers = [replace(attention, kv_source=sources.get(index)) for index in range(count)]
    layers = tuple(LayerConfig(mixer, MLPConfig(8)) for mixer in mixers)
    return ModelConfig(8, 8, layers, norm_eps=1e-5, tie_embeddings=True, max_context=64)


@pytest.mark.parametrize("seed", range(10))
def test_stages_are_as_even_as_possible(seed: int) -> None:
    rng = random.Random(seed)
    count, stages = rng.randrange(4, 9), rng.randrange(2, 5)
    sources = {index: rng.randrange(index) for index in range(1, count) if rng.random() < 0.15}
    config, outside = config_of(count, sources), rng.randrange(50)
    sizes, shares = [rng.randrange(1, 20) for _ in range(count)], [rng.uniform(0.5, 3) for _ in range(stages)]

    def load(borders: tuple[int, ...]) -> float:
        loads = [sum(sizes[stage.first : stage.end]) for stage in stages_between(borders)]
        loads[0] += outside
        return max(load / share for load, share in zip(loads, shares, strict=True))

    def together(borders: tuple[int, ...]) -> bool:
        return all(not source < border <= index for index, source in sources.items() for border in borders[1:-1])

    possible = [
        (0, *inner, count)
        for inner in itertools.combinations(range(1, count), stages - 1)
        if together((0, *inner, count))
    ]
    if not possible:
        with pytest.raises(UnsupportedModel, match="cannot have"):
            divide_layers(config, sizes, outside, shares)
        return
    borders = divide_layers(config, sizes, outside, shares)
    assert borders in possible
    assert load(borders) == pytest.approx(min(map(load, possible)))


def test_shares_are_of_the_stored_bytes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", num_hidden_layers=12)
    header = read_header(tmp_path)
    config = parse_config(header.config)
    for shares in ((1.0, 1.0), (3.0, 1.0), (24.0, 16.0, 8.0)):
        borders = divide_model(header, config, shares)
        parts = [part_of_model(header, config, Position(i, 1, borders))[0] for i in range(len(shares))]
        largest_layer = max(
            sum(t.nbytes for name, t in header.tensors.items() if name.startswith(f"layers.{i}."))
            for i in range(12)
        )
        for part, share in zip(parts, shares, strict=True):
            assert abs(part.stored_bytes - header.stored_bytes * share / sum(shares)) <= largest_layer


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, (2, ())),
        ("2", (2, ())),
        ("24,16", (2, (24.0, 16.0))),
        ((0.5, 1, 1), (3, (0.5, 1.0, 1.0))),
    ],
)
def test_a_number_of_stages_or_their_shares(value: object, expected: object) -> None:
    assert parse_shares(value) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [0, -1, "", "a", "1.5", "2,0", "2,-1", "nan,1", "1,inf", True, None, 65, [], "1,,2"]
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="is not a number of"):
        parse_shares(value)  # type: ignore[arg-type]


def test_too_many_stages_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    header = read_header(tmp_path)
    options = LoadOptions(pipeline_parallel=4)
    with pytest.raises(UnsupportedModel, match="a model with 3 layers cannot have 4 stages"):
        check_fit(header, FreeMemory("cpu", 2**30), options, name="model")


def test_a_gpu_plans_for_the_stage_with_the_least_room(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3.5"]
    make_checkpoint(tmp_path, kind, **changes)
    header = read_header(tmp_path)
    one = check_fit(header, FreeMemory("cuda", 2**33), LoadOptions(dtype="float32"), name="model")
    options = LoadOptions(dtype="float32", pipeline_parallel=2)
    even = check_fit(header, FreeMemory("cuda", 2**33), options, name="model")
    assert one.memory and even.memory
    assert len(even.borders) == 3
    assert even.memory.block_bytes < one.memory.block_bytes
    assert even.memory.state_slots
    assert even.weights.total < one.weights.total
    # Shares follow the memory, and the smaller one decides how much is cached.
    uneven = check_fit(header, FreeMemory("cuda", 2**31, stage_bytes=(2**33, 2**31)), options, name="model")
    assert uneven.borders[1] > even.borders[1]
    assert uneven.memory and uneven.memory.blocks <= even.memory.blocks
