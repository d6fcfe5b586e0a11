"""Quantized checkpoints in published layouts give the logits of their dequantized weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from localllm.checkpoint.facts import summarize_model
from localllm.errors import DamagedModel
from localllm.quant.tensor import QuantizedTensor
from tests.checkpoint import published
from tests.checkpoint.published import LAYOUTS, MATRIX, compressed, gptq, in_words, pack_quantized, write
from tests.checkpoint.test_bad_files import edit_tensors
from tests.models.families import FAMILIES
from tests.models.proofs import difference, token_ids
from tests.tiny import make_engine

IDS = token_ids(40)
# Rows and columns that every layout can cut: GPTQ stores runs of 8 columns, AWQ of 8 rows.
MIXTURE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
EVEN = {**MIXTURE, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 8, "v_head_dim": 16}


def check(folder: Path, model: Any, bound: float = 1e-3) -> Any:
    engine = make_engine(folder)
    assert difference(engine.logits(IDS), model(torch.tensor([IDS])).logits[0]) <= bound
    return engine.runner.model


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, layout: str) -> None:
    check(tmp_path, write(tmp_path, *LAYOUTS[layout]))


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("layout", ["awq", "gptq, desc_act", "W4A16, zero points", "fp8, blocks"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {}),  # biases
        ("Phi-3", {}),  # stacked in the file
        ("Mixtral", {}),
        ("Qwen3-MoE", MIXTURE),
        ("DeepSeek-V3", EVEN),
        ("Qwen3-Next", MIXTURE | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}),  # rows reordered
    ],
)
def test_families_of_other_shapes(tmp_path: Path, family: str, changes: dict[str, Any], layout: str) -> None:
    kind, own = FAMILIES[family]
    if kind == "DeepseekV3":  # its heads are not of one size
        changes = changes | {"head_dim": 8, "num_key_value_heads": 4}
    check(tmp_path, write(tmp_path, *LAYOUTS[layout], kind, **own | changes))


def test_experts_that_are_stacked_in_fp8(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3.5-MoE"]
    writers = {r".*experts\.\w+_proj": published.stack_of_float8}
    _, quantization = LAYOUTS["fp8, blocks"]
    check(tmp_path, write(tmp_path, writers, quantization, kind, **changes))


@pytest.mark.parametrize("layout", ["W4A16", "gptq, desc_act", "awq"])
def test_matrices_with_the_same_input_are_fused(tmp_path: Path, layout: str) -> None:
    model = check(tmp_path, write(tmp_path, *LAYOUTS[layout]))
    [qkv], [gate_up] = model.layers[0].mixer.qkv.weights, model.layers[0].ffn.gate_up.weights
    assert qkv.shape == (64 + 2 * 32, 64) and gate_up.shape == (2 * 96, 64)
    assert isinstance(qkv, QuantizedTensor)
    assert qkv.parts["scale"].dtype == (torch.bfloat16 if layout == "W4A16" else torch.float16)  # as stored
    assert ("columns" in qkv.parts) == (layout == "gptq, desc_act")


def test_matrices_in_different_orders_stay_apart(tmp_path: Path) -> None:
    def otherwise(weight: Tensor) -> published.Stored:
        flipped, exact = gptq(weight.flip(1), desc_act=True)
        words = torch.from_numpy(flipped["qweight"].numpy().copy())
        codes = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], 1).flatten(0, 1)  # [in, out]
        changed = {"qweight": in_words(codes.flip(0).T.numpy(), 4).T.contiguous()}
        return flipped | changed | {"g_idx": flipped["g_idx"].flip(0)}, exact.flip(1)

    writers = {r".*v_proj\.weight": otherwise, MATRIX: partial(gptq, desc_act=True)}
    model = check(tmp_path, write(tmp_path, writers, LAYOUTS["gptq, desc_act"][1]))
    assert len(model.layers[0].mixer.qkv.weights) == 3
    assert len(model.layers[0].ffn.gate_up.weights) == 1


def test_layers_and_matrices_that_are_left_out_run_as_they_are(tmp_path: Path) -> None:
    writer, quantization = LAYOUTS["awq"]
    writers = {r".*layers\.0.*(q|gate|down)_proj\.weight": writer, r".*layers\.2.*_proj\.weight": writer}
    model = check(tmp_path, write(tmp_path, writers, quantization | {"modules_to_not_convert": ["layers.1"]}))
    kinds = [type(weight) for weight in model.layers[0].mixer.qkv.weights]
    assert kinds == [QuantizedTensor, Tensor, Tensor]
    assert isinstance(model.layers[1].mixer.qkv.weights[0], Tensor)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_8_bits_over_layers_in_4(tmp_path: Path, tied: bool) -> None:
    four, eight = ({"symmetric": True, "type": "int", "num_bits": bits} for bits in (4, 8))
    quantization = compressed("pack-quantized", num_bits=4)
    quantization["config_groups"] = {
        "group_0": {"targets": ["re:.*proj$"], "weights": four | {"strategy": "group", "group_size": 32}},
        "group_1": {"targets": ["lm_head"], "weights": eight | {"strategy": "channel", "group_size": None}},
    }
    head = {} if tied else {r"lm_head\.weight": partial(pack_quantized, bits=8, group=-1)}
    writers = {MATRIX: pack_quantized} | head
    model = check(tmp_path, write(tmp_path, writers, quantization, tie_word_embeddings=tied))
    assert isinstance(model.embedding.weight, Tensor)
    forms = [(form.name, form.tensors) for form in summarize_model(tmp_path).formats]
    assert ("INT4", 3 * 7) in forms and (("INT8", 1) in forms) != tied


def test_a_head_that_gptq_quantized(tmp_path: Path) -> None:
    writers = {MATRIX: gptq, r"lm_head\.weight": gptq}
    model = check(tmp_path, write(tmp_path, writers, LAYOUTS["gptq"][1] | {"lm_head": True}))
    assert model.lm_head.weights[0].format.startswith("int4")


def test_modules_that_gptq_gave_other_bits(tmp_path: Path) -> None:
    changed = {r"+:.*down_proj.*": {"bits": 8, "group_size": 48}, r"-:.*lm_head.*": {}}
    writers = {r".*down_proj\.weight": partial(gptq, bits=8, group=48), MATRIX: gptq}
    model = check(tmp_path, write(tmp_path, writers, LAYOUTS["gptq"][1] | {"dynamic": changed}))
    assert model.layers[0].mixer.out.weights[0].format.startswith("int4")


def test_zero_biases_written_by_gptq_are_ignored(tmp_path: Path) -> None:
    model = write(tmp_path, *LAYOUTS["gptq"])
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.1.mlp.down_proj.bias": torch.zeros(64)}))
    check(tmp_path, model)


def test_zero_points_beyond_their_bits_are_refused(tmp_path: Path) -> None:
    write(tmp_path, *LAYOUTS["W4A16, blocks of a row, zero points"])
    edit_tensors(tmp_path, lambda t: t["model.layers.1.mlp.down_proj.weight_zero_point"].fill_(8))
    with pytest.raises(DamagedModel, match="has zero points of more than 4 bits"):
        make_engine(tmp_path)


def test_activations_are_in_8_bits_where_the_file_says_so(tmp_path: Path) -> None:
    model = write(tmp_path, *published.W8A8)
    ids = torch.tensor([IDS])
    weights_alone = model(ids).logits[0]

    def in_8_bits(module: nn.Module, given: tuple[Tensor]) -> Tensor:
        scale = given[0].abs().amax(-1, keepdim=True) / 127
        return (given[0] / scale).round() * scale

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(in_8_bits)
    expected = model(ids).logits[0]
    engine = make_engine(tmp_path)
    assert engine.runner.model.layers[0].ffn.down.weights[0].format == "w8a8"
    # What lies between two steps may fall to either side.
    assert difference(engine.logits(IDS), expected) < difference(weights_alone, expected) / 4
