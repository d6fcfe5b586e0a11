"""Parameters, cache sizes, bytes and operations by `arch.cost`, compared with what torch's dispatcher records in a
step without compiled kernels.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from localllm.arch.config import AttentionConfig
from localllm.arch.cost import (
    SequenceStep,
    WeightBytes,
    busiest_rank_experts,
    bytes_read,
    expert_fraction_read,
    expert_imbalance,
    flops,
    kv_bytes_per_token,
    kv_bytes_read,
    parameter_count,
    query_key_pairs,
)
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.plan.weights import weight_bytes
from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import SequenceState
from tests.models.families import FAMILIES
from tests.plan.allocated import Reads, alive, bytes_of
from tests.plan.published import DEEPSEEK_V3
from tests.tiny import CPU, make_checkpoint, make_engine, weights_of

CONTEXT = 41
KINDS = ("Llama 3.x", "Gemma 3", "Gemma 4, like E2B", "DeepSeek-V3", "Qwen3-Next", "LFM2", "Mixtral", "gpt-oss")


def decode(engine: Engine, mode: Any) -> None:
    """Run a step of one token under `mode`, after CONTEXT - 1 tokens."""
    state = SequenceState(engine.pool)
    ids = [i * 7 % 300 + 3 for i in range(CONTEXT)]
    with torch.inference_mode():
        for tokens in (ids[:-1], ids[-1:]):
            state.extend(len(tokens))
            last = [len(tokens) - 1]
            batch = Batch.from_states([state], [tokens], last, CPU, engine.pool.drain_copies())
            if len(tokens) == 1:
                with mode:
                    engine.runner.launch(batch)
            else:
                engine.runner.launch(batch)
    state.free()


def of_attention(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """q: [1, heads, queries, dim]; k: [1, heads, keys, dim]"""
    return 4 * q[1] * q[2] * k[2] * q[3]


@pytest.mark.quick_every(2)
@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("family", KINDS)
def test_a_step_reads_the_predicted_bytes(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    header = read_header(tmp_path)
    config = parse_config(header.config)
    weights = weight_bytes(header, config, "float32", "cpu")
    engine = make_engine(tmp_path)
    reads = Reads(alive())
    decode(engine, reads)
    told = bytes_read(config, weights, (SequenceStep(1, CONTEXT),), 4)
    assert told == pytest.approx(bytes_of(reads.read), rel=0.03)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("family", KINDS)
def test_a_step_computes_the_predicted_operations(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    config = parse_config(read_header(tmp_path).config)
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: of_attention}
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    decode(make_engine(tmp_path), counter)
    assert flops(config, (SequenceStep(1, CONTEXT),)) == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_pairs_are_counted_one_by_one() -> None:
    for window in (None, 1, 4, 9):
        c = AttentionConfig(heads=1, kv_heads=1, head_dim=2, rope=None, scale=1.0, window=window)
        for context in range(1, 14):
            for tokens in range(1, context + 1):
                visible = [min(p + 1, window or p + 1) for p in range(context - tokens, context)]
                assert query_key_pairs(c, SequenceStep(tokens, context)) == sum(visible)


def test_more_tokens_touch_more_experts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["Mixtral"][0], **FAMILIES["Mixtral"][1])  # 2 of 5
    config = parse_config(read_header(tmp_path).config)
    assert expert_fraction_read(config, 1) == pytest.approx(2 / 5)
    assert expert_fraction_read(config, 2) == pytest.approx(1 - (3 / 5) ** 2)
    assert expert_fraction_read(config, 100) == pytest.approx(1.0)


def test_the_busiest_rank_has_more_than_the_mean_of_few_experts(tmp_path: Path) -> None:
    for experts, selected, ranks in ((8, 2, 2), (8, 3, 4), (12, 5, 3), (8, 8, 2), (6, 1, 6)):
        own = experts // ranks
        counts = [
            max(sum(expert // own == rank for expert in choice) for rank in range(ranks))
            for choice in combinations(range(experts), selected)
        ]
        assert busiest_rank_experts(experts, selected, ranks) == pytest.approx(sum(counts) / len(counts))
    make_checkpoint(tmp_path, FAMILIES["Mixtral"][0], **FAMILIES["Mixtral"][1] | {"num_local_experts": 8})
    config = parse_config(read_header(tmp_path).config)
    factors = [expert_imbalance(config, tokens, 4) for tokens in (1, 2, 4, 1000)]
    assert factors == sorted(factors, reverse=True) and factors[0] > 2 and factors[-1] == 1


def test_windows_bound_reads_and_shared_keys_are_read_twice(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "g3", FAMILIES["Gemma 3"][0], **FAMILIES["Gemma 3"][1])
    config = parse_config(read_header(tmp_path / "g3").config)
    of_token = 2 * 2 * 10 * 2  # keys and values of 2 heads of 10, 16 bits
    assert kv_bytes_read(config, (SequenceStep(1, 100),), 2) == (100 + 2 * 9) * of_token
    assert kv_bytes_read(config, (SequenceStep(1, 5, sequences=3),), 2) == 3 * 3 * 5 * of_token
    of_8_bits = 2 * 2 * (10 + 2)
    assert kv_bytes_read(config, (SequenceStep(1, 100),), 1, scale_bytes=2) == (100 + 2 * 9) * of_8_bits
    assert kv_bytes_read(config, (SequenceStep(20, 100),), 2) == (100 + 2 * (9 + 19)) * of_token


def test_deepseek_v3_caches_70_kb_and_activates_37_billion_parameters_per_token() -> None:
    config = parse_config(DEEPSEEK_V3)
    assert kv_bytes_per_token(config, 2) == 70_272  # "Insights into DeepSeek-V3" (2025), table 1
    assert flops(config, (SequenceStep(1, 1),)) == pytest.approx(2 * 36.7e9, rel=0.02)  # without the embedding
    of_experts = WeightBytes(layers=0, experts=58 * 256 * 3 * 7168 * 2048, head=0, tables=0)
    assert bytes_read(config, of_experts, (SequenceStep(1, 1),), 0) == pytest.approx(
        of_experts.experts * 8 / 256, abs=2
    )


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_parameters_are_counted_to_the_last(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = make_checkpoint(tmp_path, kind, **changes)
    config = parse_config(read_header(tmp_path).config)
    assert parameter_count(config) == sum(weight.numel() for weight in weights_of(model))


def test_a_token_takes_keys_and_values_in_every_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    assert kv_bytes_per_token(parse_config(read_header(tmp_path).config), 2) == 3 * 2 * 2 * 10 * 2
