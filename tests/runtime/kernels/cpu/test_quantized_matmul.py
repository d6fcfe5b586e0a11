"""Products with interleaved weights against the dequantized weight in float64."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.interleaved import interleave
from localllm.quant.packing import GGUF_INTERLEAVED_BYTES
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import matmul_ir
from localllm.runtime.kernels.cpu.quantized_matmul import matmul_dequantized, matmul_integers
from localllm.runtime.kernels.threads import openmp
from tests.quant.formats.test_interleaved import blocks, integers

WAYS = {"few": matmul_integers, "many": matmul_dequantized}
# Of sum |x| |w|: what the planes of x, and the result in its dtype, round off.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def laned(weight: QuantizedTensor) -> QuantizedTensor:
    found = interleave(weight)
    assert found
    return found


def rows_of(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def check(weight: QuantizedTensor, way: str, dtype: torch.dtype) -> None:
    exact = dequantize(weight, torch.float64)
    for count in (1, 3, 9):
        x = rows_of(count, weight.shape[1], dtype)
        y = WAYS[way](x, laned(weight))
        assert y.dtype == dtype and y.shape == (count, weight.shape[0])
        size = x.double().abs() @ exact.abs().T
        assert ((y.double() - x.double() @ exact.T).abs() <= BOUND[dtype] * size).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", GGUF_INTERLEAVED_BYTES)
def test_blocks_of_gguf(form: str, way: str) -> None:
    check(blocks(form, 37, 512), way, torch.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("group", [None, 16, 32, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_integer_weights(form: str, group: int | None, zeros: bool, way: str) -> None:
    check(integers(form, 21, 300, group, zeros=zeros), way, torch.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int4", "int8", "q4_k"])
def test_shorter_floats(form: str, dtype: torch.dtype, way: str) -> None:
    """The dtype applies to x, the result and scales. The code that reads packed formats is that of float32."""
    if form == "q4_k":
        return check(blocks(form, 37, 512), way, dtype)
    weight = integers(form, 21, 300, 32)
    scale = weight.parts["scale"].to(dtype)
    check(QuantizedTensor(form, weight.shape, weight.parts | {"scale": scale}, 32), way, dtype)


@pytest.mark.parametrize("form", ["q4_0", "q8_0", "q6_k"])
def test_activations_keep_as_many_bits_as_they_are_given(form: str) -> None:
    stored = blocks(form, 37, 512)
    exact, x = dequantize(stored, torch.float64), rows_of(5, 512, torch.float32)
    size = x.double().abs() @ exact.abs().T
    lost = {}
    for bits in (8, 16, 24):
        weight = replace(laned(stored), activation_bits=bits)
        lost[bits] = ((matmul_integers(x, weight).double() - x.double() @ exact.T).abs() / size).max().item()
    assert 2.0**-12 < lost[8] < 2.0**-6 and 2.0**-20 < lost[16] < 2.0**-14 and lost[24] < BOUND[torch.float32]


@pytest.mark.parametrize("way", WAYS)
def test_columns_in_another_order(way: str) -> None:
    weight = integers("int4", 16, 64, 32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    check(QuantizedTensor("int4", weight.shape, weight.parts | {"columns": order}, 32), way, torch.float32)


@pytest.mark.parametrize("form", ["q4_0", "q4_k", "q6_k"])
def test_a_row_does_not_depend_on_the_others_of_few(form: str) -> None:
    weight, x = laned(blocks(form, 37, 512)), rows_of(7, 512, torch.float32)
    together = matmul_integers(x, weight)
    for i in range(len(x)):
        assert torch.equal(matmul_integers(x[i : i + 1], weight)[0], together[i])


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_the_threads() -> None:
    weight, x = laned(blocks("q8_0", 100, 512)), rows_of(3, 512, torch.float32)
    torch.set_num_threads(1)
    alone = matmul_integers(x, weight)
    torch.set_num_threads(3)
    assert torch.equal(matmul_integers(x, weight), alone)


@pytest.mark.skipif(not openmp(), reason="this torch brings no OpenMP of GNU")
@pytest.mark.usefixtures("threads")
def test_fewer_threads_than_were_wanted_do_all() -> None:
    """OMP_THREAD_LIMIT, OMP_DYNAMIC and nested regions reduce their number."""
    weight, x = laned(blocks("q8_0", 1000, 64)), rows_of(3, 64, torch.float32)
    torch.set_num_threads(1)
    alone = matmul_integers(x, weight)
    torch.set_num_threads(2 * (os.cpu_count() or 1) + 1)
    openmp().omp_set_dynamic(1)  # no more than cores
    try:
        assert torch.equal(matmul_integers(x, weight), alone)
    finally:
        openmp().omp_set_dynamic(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_nan_stays_nan(way: str, odd: float) -> None:
    weight, x = laned(blocks("q4_0", 16, 64)), rows_of(2, 64, torch.float32)
    x[0, 40] = odd
    y = WAYS[way](x, weight)
    assert not y[0].isfinite().any() and y[1].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e30])
def test_all_sizes_of_x(size: float) -> None:
    weight = blocks("q8_0", 16, 64)
    x = rows_of(1, 64, torch.float32) * size
    expected = x.double() @ dequantize(weight, torch.float64).T
    bound = 1e-6 * (x.double().abs() @ dequantize(weight, torch.float64).abs().T) + 1e-30
    assert ((matmul_integers(x, laned(weight)).double() - expected).abs() <= bound).all()


def test_outliers_do_not_spoil_other_groups() -> None:
    weight = blocks("q8_0", 16, 128)
    x = rows_of(1, 128, torch.bfloat16)
    x[0, 3] = 1e6
    weight.parts["blocks"][:, :34] = 0  # the first group of every row: only the others tell
    exact = dequantize(weight, torch.float64)
    error = (matmul_integers(x, laned(weight)).double() - x.double() @ exact.T).abs()
    assert (error <= 2.0**-8 * (x.double().abs() @ exact.abs().T)).all()


def test_concurrent_requests_compile_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource

    made: list[int] = []

    def write(size: int) -> KernelSource:
        made.append(size)
        split = matmul_ir.SplitFormat.for_processor("avx512vnni", 4, 2, 1)
        return KernelSource(lambda p: matmul_ir.emit_split(p, torch.float32, size, split), "split", 6)

    program = CompileOnce(write)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(program, 48) for _ in range(4)] + [program.compile_ahead(48)]
    assert len({id(one.result()) for one in found}) == 1 and made == [48]
