"""Folders written by `quantize` load in `transformers` with compressed-tensors, both ways, with our logits."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

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
    "rtn INT8": ("rtn", 8, None, False, None),
    "rtn INT8, groups": ("rtn", 8, 32, False, None),
    "gptq INT4": ("gptq", 4, 32, False, None),
    "awq INT4": ("awq", 4, 32, False, None),
    "awq INT4, zero points": ("awq", 4, 32, True, None),
    "smoothquant W8A8": ("smoothquant", None, None, False, "int8"),
}
# From 0.18 on compressed-tensors expects zero points in another shape than it writes, of whoever's file.
ZERO_POINTS_LOAD = tuple(map(int, version("compressed-tensors").split(".")[:2])) < (0, 18)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", METHODS)
def test_a_folder_loads_in_both_ways_with_the_same_logits(tmp_path: Path, name: str, tied: bool) -> None:
    method, bits, group, asymmetric, activations = METHODS[name]
    from transformers import AutoModelForCausalLM  # these take a second
    from transformers.utils.quantization_config import CompressedTensorsConfig

    recipe = build_recipe(method, bits, group, asymmetric=asymmetric, activations=activations)
    make_checkpoint(tmp_path / "model", "Llama", tie_word_embeddings=tied, **SIZES)
    header = read_header(tmp_path / "model")
    with Artefact(tmp_path / "small", header, recipe) as artefact:
        quantize_layers(header, recipe, text() if method != "rtn" else None, artefact, silent)
        artefact.finish()
    expected = make_engine(tmp_path / "small").logits(IDS)
    for dequantize in (False, True):
        if asymmetric and not dequantize and not ZERO_POINTS_LOAD:
            continue
        model, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "small",
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=dequantize),
            output_loading_info=True,
        )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([IDS])).logits[0]
        if activations:  # rounded another way there, or not at all
            assert (logits - expected).abs().mean() < 0.1 * expected.std()
        else:
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
