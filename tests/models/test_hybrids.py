"""Models with recurrent layers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.arch.describe import parse_config
from localllm.quant.dequantize import dequantize
from localllm.quant.formats.groups import quantize_int8
from localllm.runtime.kv_cache.sequence_state import SequenceState
from tests.models.families import FAMILIES
from tests.models.proofs import extend, token_ids
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import make_checkpoint, make_engine


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "LFM2", "LFM2-MoE"])
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, changes = FAMILIES[name]
    theirs = make_checkpoint(tmp_path, kind, **changes)
    prompt = token_ids(75)
    expected = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 75), do_sample=False, max_new_tokens=60
    )
    asked = sequence(prompt, temperature=0, max_tokens=60)
    got = tokens(run(make_engine(tmp_path, token_budget=40), [asked])[asked.request.id])
    assert got == expected[0, 75:].tolist()


def test_multi_token_prediction_weights_are_not_loaded(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3.5"]
    make_checkpoint(tmp_path, kind, **changes)
    expected = make_engine(tmp_path).logits([5, 6, 7])
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {"mtp.fc.weight": torch.zeros(48, 96)}
    save_file(weights, file)
    assert torch.equal(make_engine(tmp_path).logits([5, 6, 7]), expected)


def test_a_model_without_any_attention_runs(tmp_path: Path) -> None:
    kind, changes = FAMILIES["LFM2"]
    theirs = make_checkpoint(tmp_path, kind, **changes | {"layer_types": ["conv"] * 3})
    ids = token_ids(30)
    expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(make_engine(tmp_path).logits(ids), expected, atol=2e-4, rtol=0)


def test_rows_of_a_packed_matrix_are_reordered_with_their_scales() -> None:
    packed = quantize_int8(torch.randn(6, 16, generator=torch.Generator().manual_seed(0)), torch.float32)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    assert torch.equal(
        dequantize(packed.select_rows(order), torch.float32), dequantize(packed, torch.float32)[order]
    )


def test_old_lfm2_configs_name_the_layers_that_attend() -> None:
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 24,
    }
    by_index = parse_config(config | {"full_attn_idxs": [1], "block_ff_dim": 24, "tie_embedding": True})
    by_kind = parse_config(config | {"layer_types": ["conv", "full_attention", "conv"]})
    assert by_index == by_kind


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2"])
@pytest.mark.parametrize("saved", [1, 6, 11, 12])
def test_a_saved_state_is_that_of_its_length(tmp_path: Path, name: str, saved: int) -> None:
    kind, changes = FAMILIES[name]
    make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path)
    ids = token_ids(30)
    state = SequenceState(engine.pool)
    extend(engine, [state], [ids[:12]], saves=[saved])
    extend(engine, [state], [ids[12:13]])
    state.rollback(12)
    assert state.length == saved
    got = extend(engine, [state], [ids[saved:]])
    torch.testing.assert_close(got, engine.logits(ids)[saved:], atol=1e-4, rtol=0)
    state.free()
    engine.pool.check_all_free()
