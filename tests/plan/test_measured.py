"""Rates measured for a format: positive, on matrices as the engine stores them, and refined by answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from localllm.benchmark.roofline import measure_ceilings
from localllm.checkpoint.header import TensorHeader, read_header
from localllm.checkpoint.matrices import PackedMatrix
from localllm.hardware import gpu_clock, measure
from localllm.hardware.measure import Rates
from localllm.hub.resolve import resolve_model
from localllm.plan import measured
from localllm.plan.weights import representative_matrix
from localllm.quant.dequantize import DEQUANTIZERS, dequantize
from localllm.quant.formats import gguf
from localllm.quant.tensor import QuantizedTensor
from tests.shared import shared

CPU = torch.device("cpu")


def silent(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("form", ["int4", "int8", "w8a8", "fp8"])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("more", [False, True])
def test_a_packed_matrix_is_held_as_the_engine_holds_it(form: str, group: int | None, more: bool) -> None:
    packed = PackedMatrix(form, 32, 512, 4 if group else 1, group, "F16", has_zeros=more, act_order=more)
    weight = measured.sample_matrix(packed, torch.bfloat16, CPU)
    assert isinstance(weight, QuantizedTensor) == (form != "fp8")
    if isinstance(weight, QuantizedTensor):
        assert (weight.format, weight.shape, weight.group) == (form, (32, 512), group)
        assert len(weight.parts) == (4 if more else 2)
        assert weight.parts["scale"].dtype == torch.float16
        weight = dequantize(weight, torch.float32)
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("form", [*sorted(gguf.FORMATS), "u8", "bf16-plain"])
def test_a_matrix_of_each_format_holds_numbers(form: str) -> None:
    blocks = form in gguf.FORMATS
    shape = (32, 16, 16) if form == "u8" else (32, 512)
    dtype = {"bf16-plain": "BF16"}.get(form, form.upper())
    tensor = TensorHeader(Path("x"), "w", dtype, shape, offset=0 if blocks else None)
    weight = measured.sample_matrix(tensor, torch.bfloat16, CPU)
    if isinstance(weight, QuantizedTensor):
        assert weight.nbytes == tensor.nbytes + sum(
            p.nbytes for name, p in weight.parts.items() if name == "scale"
        )
        assert weight.format in DEQUANTIZERS
        weight = dequantize(weight, torch.float32)
    assert weight.shape == (32, 512)
    smallest = torch.finfo(torch.float32).tiny
    assert torch.isfinite(weight).all()
    assert (weight.abs() >= smallest).logical_or(weight == 0).all()


def test_the_format_of_most_bytes_stands_for_all() -> None:
    demo, gguf = representative_matrix(read_header(resolve_model("demo").path)), shared("gguf/model-q4_k_m.gguf")
    assert isinstance(demo, PackedMatrix) and demo.format == "int8"
    assert getattr(representative_matrix(read_header(gguf)), "dtype", None) == "Q4_K"


@pytest.mark.parametrize("measurement", ["plan", "ceilings"])
def test_a_second_gpu_is_measured_as_the_current_device(monkeypatch: pytest.MonkeyPatch, measurement: str) -> None:
    """As on a machine with two GPUs, with tensors that have no memory."""
    current, seen = [0], list[int]()

    @contextmanager
    def device(named: torch.device) -> Iterator[None]:
        current.append(named.index)
        yield
        current.pop()

    def noted(seconds: float) -> float:
        seen.append(current[-1])
        return seconds

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(gpu_clock, "capture", lambda run, device: run)
    monkeypatch.setattr(gpu_clock, "seconds", lambda *arguments: noted(1.0))
    monkeypatch.setattr(measure, "median_seconds", lambda *arguments: noted(1.0))
    monkeypatch.setattr(measure, "measure", lambda device, dtype: Rates(noted(1.0), 1.0, 1.0, 1.0))
    monkeypatch.setattr(measure, "free_bytes", lambda device: 2**24)
    header = TensorHeader(Path("x"), "w", "BF16", (64, 64))
    second = torch.device("cuda", 1)
    with FakeTensorMode():
        if measurement == "plan":
            measured.measure_matmul(header, torch.bfloat16, second, 1)
        else:
            measure_ceilings(header, torch.bfloat16, second, 1, [1], 2**20)
    assert len(seen) >= 3 and set(seen) == {1}
    assert current == [0]
