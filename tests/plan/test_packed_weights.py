"""Planned bytes of weights on a GPU equal their packed layout under the interpreter."""

from pathlib import Path

import pytest
import torch

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.checkpoint.tensors import Weights
from localllm.plan.weights import weight_bytes
from localllm.quant.packing import stays_packed
from localllm.runtime import weight_source
from localllm.runtime.kernels.gpu import dequantize as unpacking
from localllm.runtime.model import Decoder
from localllm.runtime.weight_source import WeightSource
from tests.checkpoint import published
from tests.checkpoint.quantized.test_mxfp4 import write_published
from tests.plan.allocated import alive, bytes_of
from tests.shared import shared
from tests.tiny import CPU

pytestmark = pytest.mark.usefixtures("interpreter")


FLOATS = [layout for layout in published.LAYOUTS if "fl" in layout or "fp8" in layout]


def check_planned(model: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    header = read_header(model)
    config = parse_config(header.config)
    before = {id(tensor) for tensor in alive()}
    decoder = Decoder(config, WeightSource(Weights(header), CPU, dtype), 64)
    unpacking._scratch.clear()  # which plans of steps count
    held = bytes_of(tensor for tensor in alive() if id(tensor) not in before)
    assert decoder
    planned = weight_bytes(header, config, str(dtype).removeprefix("torch."), "cuda").total
    assert planned == pytest.approx(held, rel=0.01)


def test_mxfp4(tmp_path: Path) -> None:
    write_published(tmp_path)
    check_planned(tmp_path)


@pytest.mark.quick_every(4)
@pytest.mark.parametrize(
    "layout", ["awq", "gptq, zero points", "gptq, 8 bits, desc_act, zero points", "W8A8", *FLOATS]
)
def test_published_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(weight_source, "stays_packed", lambda form, _: stays_packed(form, "cuda"))
    published.write(tmp_path, *published.LAYOUTS.get(layout, published.W8A8))
    check_planned(tmp_path)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("form", ["f16", "q5_1", "q2_k", "q3_k_m", "q4_k_m", "iq4_xs"])
def test_gguf(form: str) -> None:
    check_planned(shared(f"gguf/model-{form}.gguf"))
