"""Folders written by `quantize` load in `transformers` with compressed-tensors, both ways, with our logits, and
have the schemes that vLLM reads."""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.checkpoint.header import read_header
from localllm.cli.quantize import build_recipe
from localllm.quantize.artefact import Artefact
from localllm.quantize.quantizer import quantize_layers
from tests.quantize.test_quantizer import silent, text
from tests.tiny import make_checkpoint, make_engine

if find_spec("compressed_tensors") is None:  # an import takes a second
    pytest.skip("compressed-tensors is not installed", allow_module_level=True)
IDS = list(range(3, 60))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
METHODS = {
    "rtn INT4": ("rtn", 4, 32, False, None),
    "rtn INT4, whole rows": ("rtn", 4, 0, False, None),
    "rtn INT4, zero points": ("rtn", 4, 32, True, None),
    "rtn INT4, whole rows, zero points": ("rtn", 4, 0, True, None),
    "rtn INT8": ("rtn", 8, None, False, None),
    "rtn INT8, zero points": ("rtn", 8, None, True, None),
    "rtn INT8, groups": ("rtn", 8, 32, False, None),
    "rtn INT8, groups, zero points": ("rtn", 8, 32, True, None),
    "gptq INT4": ("gptq", 4, 32, False, None),
    "gptq INT4, zero points": ("gptq", 4, 32, True, None),
    "awq INT4": ("awq", 4, 32, False, None),
    "awq INT4, zero points": ("awq", 4, 32, True, None),
    "smoothquant W8A8": ("smoothquant", None, None, False, "int8"),
}


def transformers_logits(folder: Path, dtype: torch.dtype, *, dequantize: bool) -> torch.Tensor:
    from transformers import AutoModelForCausalLM  # these take a second
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=CompressedTensorsConfig(dequantize=dequantize),
        output_loading_info=True,
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    packed = [name for name, tensor in model.named_parameters() if tensor.dtype in (torch.int32, torch.int8)]
    assert dequantize != bool(packed)  # compressed until the first forward pass
    with torch.inference_mode():
        return model.eval()(torch.tensor([IDS])).logits[0]


def quantize(folder: Path, name: str, *, tied: bool) -> Path:
    """Write a small model and quantize it by the flags of METHODS."""
    method, bits, group, asymmetric, activations = METHODS[name]
    recipe = build_recipe(method, bits, group, asymmetric=asymmetric, activations=activations)
    make_checkpoint(folder / "model", "Llama", tie_word_embeddings=tied, **SIZES)
    header = read_header(folder / "model")
    with Artefact(folder / "small", header, recipe) as artefact:
        quantize_layers(header, recipe, text() if method != "rtn" else None, artefact, silent)
        return artefact.finish()


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """Return the folder of `quantize` by a name and whether the head is tied, written once."""
    return cache(lambda name, tied: quantize(tmp_path_factory.mktemp("model"), name, tied=tied))


def vllm_scheme(group: dict[str, Any]) -> str | None:
    """Return what vLLM takes a group of config.json for, by the rules of its CompressedTensorsConfig; None if it
    raises an error."""
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType

    weights = QuantizationArgs.model_validate(group["weights"])
    inputs = group["input_activations"] and QuantizationArgs.model_validate(group["input_activations"])
    assert weights.type == QuantizationType.INT and not weights.dynamic
    by_row = weights.strategy == QuantizationStrategy.CHANNEL
    if inputs is None:
        is_packed = group["format"] == CompressionFormat.pack_quantized.value and weights.num_bits in (4, 8)
        in_groups = weights.strategy == QuantizationStrategy.GROUP and weights.group_size
        return "weights" if is_packed and (by_row or in_groups) else None
    is_plain = group["format"] == CompressionFormat.int_quantized.value
    in_bytes = weights.num_bits == inputs.num_bits == 8 and weights.symmetric
    by_token = inputs.strategy == QuantizationStrategy.TOKEN and inputs.dynamic
    return "weights and activations" if is_plain and in_bytes and by_row and by_token else None


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", METHODS)
def test_vllm_has_a_scheme_for_all_but_zero_points(
    quantized: Callable[[str, bool], Path], name: str, tied: bool
) -> None:
    folder = quantized(name, tied)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    [group] = config["config_groups"].values()  # q, k and v are one matrix there
    expected = "weights and activations" if METHODS[name][4] else None if METHODS[name][3] else "weights"
    assert vllm_scheme(group) == expected
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in names) == (not tied)
    stored = {"weight", "weight_scale"} if METHODS[name][4] else {"weight_packed", "weight_scale", "weight_shape"}
    stored |= {"weight_zero_point"} if METHODS[name][3] else set()
    projection = "model.layers.0.self_attn.q_proj."
    assert {each.removeprefix(projection) for each in names if each.startswith(projection)} == stored


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", METHODS)
def test_a_folder_loads_in_both_ways_with_the_same_logits(
    quantized: Callable[[str, bool], Path], name: str, tied: bool
) -> None:
    folder = quantized(name, tied)
    ours = make_engine(folder).logits(IDS)
    compressed = transformers_logits(folder, torch.float32, dequantize=False)
    dequantized = transformers_logits(folder, torch.float32, dequantize=True)
    if METHODS[name][4]:  # rounded another way there, or not at all
        for logits in (compressed, dequantized):
            assert (logits - ours).abs().mean() < 0.1 * ours.std()
        return
    exact = transformers_logits(folder, torch.float64, dequantize=True)
    bound = 2 * (dequantized - exact).abs().max()
    assert 0 < bound < 1e-4 * exact.std()
    assert (compressed - exact).abs().max() <= bound
    assert (ours - exact).abs().max() <= bound
