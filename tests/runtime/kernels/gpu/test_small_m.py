"""Products of few rows are exact, and do not depend on the batch."""

from math import prod
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.dequantize import dequantize
from localllm.quant.formats import gguf
from localllm.quant.formats.gpu_packed import pack_codes, repack
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor
from localllm.runtime.cuda_graphs import BATCH_BUCKETS
from localllm.runtime.kernels.fused import fused_linear, residual_linear
from localllm.runtime.kernels.gpu.launch import (
    AMD_GPUS,
    GPUS,
    INTERPRETED,
    Gpu,
    meta_packed_weight,
    meta_tensor,
    record_launches,
)
from localllm.runtime.kernels.gpu.small_m import ticket_counters
from localllm.runtime.kernels.gpu.small_m_linear import small_m_matmul
from localllm.runtime.kernels.gpu.tiles import default_tile, tile_grid
from localllm.runtime.kernels.linear import linear
from localllm.runtime.kernels.norm import FollowingNorm, Norm, PreparedNorm
from localllm.runtime.kernels.registry import explain
from tests.gpu.test_engine import MORE, SAME_BITS
from tests.quant.formats.test_interleaved import blocks, integers
from tests.runtime.kernels.harness import check_on_gpu

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def planes(form: str, rows: int, columns: int, group: int | None, *, zeros: bool = False) -> QuantizedTensor:
    weight = integers(form, rows, columns, group, zeros=zeros)
    weight.parts["scale"] = (weight.parts["scale"] / 8).bfloat16()
    made = repack(weight)
    assert made
    return made


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "group", "zeros"),
    [
        ("int4", 128, False),
        ("int4", 64, True),
        ("int4", 32, True),
        ("int4", 16, False),
        ("int4", None, True),
        ("int8", None, False),
        ("int8", 128, True),
        ("int8", 32, False),
    ],
)
def test_packed_weights(form: str, group: int | None, zeros: bool, dtype: torch.dtype) -> None:
    weight = planes(form, 40, 300, group, zeros=zeros)
    x, bias = random(5, 300), random(40)
    ran = check_on_gpu("linear", lambda d: (x.to(d), weight, bias.to(d)), dtype, terms=300)
    assert ran[0] == "triton-skinny-planes"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 33, 256), (2, 1, 77), (16, 70, 130)])
def test_plain_weights(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = random(tokens, columns), random(rows, columns)
    assert check_on_gpu("plain_linear", lambda d: (x.to(d), weight.to(d), None), dtype) == ["triton-skinny"]


@pytest.mark.quick_every(7)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + infinity) is the 0 that is meant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "swiglu_clamped"])
@pytest.mark.parametrize("form", ["int4", "plain"])
def test_epilogues_of_a_product(form: str, activation: Activation, dtype: torch.dtype) -> None:
    rows, columns, tokens = 44, 320, 3
    weight = planes("int4", rows, columns, 64) if form == "int4" else random(rows, columns) / 16
    x, bias, residual = random(tokens, columns), random(rows), random(tokens, rows // 2)
    gamma = torch.rand(columns)

    def make(d: torch.dtype) -> tuple[object, ...]:
        norm = Norm(gamma.to(torch.promote_types(d, torch.float32)), 1e-5)
        matrix = weight if isinstance(weight, QuantizedTensor) else weight.to(d)
        return x.to(d), (matrix,), bias.to(d), norm, activation, residual.to(d)

    assert check_on_gpu("fused_linear", make, dtype) == ["triton-skinny"]


@pytest.mark.quick_every(5)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN and infinity, as numpy sees them
@pytest.mark.parametrize("form", ["int4", "int8", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_count_or_content_of_others(form: str, dtype: torch.dtype) -> None:
    weight = random(34, 384).to(dtype) if form == "plain" else planes(form, 34, 384, 32)
    x = random(16, 384).to(dtype)
    # The interpreter multiplies with NumPy, whose order of sums depends on the number of rows, which are padded.
    padding = x.new_zeros(8 if INTERPRETED.value else 0, 384)
    alone = torch.cat([small_m_matmul(torch.cat((x[i : i + 1], padding)), weight, None)[:1] for i in (0, 7, 15)])
    together = small_m_matmul(x, weight, None)[[0, 7, 15]]
    x[[1, 6, 8, 14]] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0]).to(dtype)[:, None]
    beside = small_m_matmul(x, weight, None)
    assert torch.equal(alone, together)
    assert torch.equal(alone, beside[[0, 7, 15]])
    assert beside[1].isnan().all() and (beside[14] == 0).all()
    assert torch.equal(alone[:2], small_m_matmul(torch.cat((x[[0, 7]], padding)), weight, None)[:2])


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("form", "group"), [("int4", 32), ("int4", 128), ("int8", None)])
def test_nothing_but_the_sum_is_rounded(form: str, group: int | None, zeros: bool) -> None:
    """Compares with float64: codes and scales are exact, so the error is that of float32 sums over K, and of
    rounding the result.
    """
    weight = planes(form, 48, 1024, group, zeros=zeros)
    # The interpreter cuts bfloat16 off, where a GPU rounds.
    for dtype, eps in ((torch.bfloat16, 2**-7), (torch.float16, 2**-11), (torch.float32, 2**-24)):
        x = (random(4, 1024) + 1).to(dtype)
        matrix = dequantize(weight, torch.float64)
        exact = x.double() @ matrix.T
        allowed = 2**-24 * 1024 * (x.double().abs() @ matrix.abs().T) + eps * exact.abs()
        assert ((small_m_matmul(x, weight, None).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("form", ["q4_1", "q2_k", "q4_k", "q6_k"])
def test_blocks_with_minimums_and_scales_of_scales(form: str) -> None:
    weight = blocks(form, 20, 512)
    rows = weight.parts[gguf.BLOCKS_PART].unflatten(1, (-1, gguf.BLOCK_TYPE_BY_NAME[form].block_bytes))
    apart = gguf.UNPACKERS[form](rows.flatten(0, 1))
    numbers = {"scale": apart.scale, "minimum": apart.minimum}
    if apart.factor is not None:
        numbers = {"scale": apart.factor, "minimum": apart.minimum_factor}
        numbers |= {"block_scale": apart.scale, "block_minimum": apart.minimum}
    parts = {name: part.reshape(20, -1) for name, part in numbers.items() if part is not None}
    group = 512 // parts["scale"].shape[1]
    made = pack_codes(apart.codes.reshape(20, -1), group, 8 if form == "q6_k" else 4, **parts)
    x = random(3, 512)
    assert check_on_gpu("linear", lambda d: (x.to(d), made, None), torch.float16)[0] == "triton-skinny-planes"


@pytest.mark.parametrize("form", ["q4_k", "q6_k"])
def test_minimums_do_not_depend_on_the_count_of_rows(form: str) -> None:
    weight, x = repack(blocks(form, 34, 512)), random(16, 512).bfloat16()
    assert weight
    weight.parts["block_scale"].mul_(2**-8)
    together = small_m_matmul(x, weight, None)
    assert together.isfinite().all()
    for rows in (9,) if INTERPRETED.value else (1, 8, 9):
        assert torch.equal(small_m_matmul(x[:rows], weight, None), together[:rows])


@pytest.mark.parametrize("form", ["int4", "int8", "plain"])
def test_up_to_8_rows_take_half_the_tensor_work_of_16(form: str) -> None:
    weight = meta_tensor(4096, 4096) if form == "plain" else meta_packed_weight(form, 4096, 4096, None)

    def padded(rows: int, gpu: Gpu) -> int:
        with record_launches(gpu) as launches:
            small_m_matmul(meta_tensor(rows, 4096), weight, None)
        return launches[0].arguments["X_ROWS"]

    assert [padded(rows, GPUS[90]) for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert [padded(rows, AMD_GPUS["gfx942"]) for rows in (1, 16)] == [16, 16]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_the_busiest_multiprocessor_has_little_more_work_than_others(gpu: Gpu) -> None:
    """Tests q with k and v, o and down of 8B and 70B. 96 tiles of 16 chunks are worst on 170 processors, where
    12 chunks are the most and 9 the mean.
    """
    shapes = (6144, 4096), (4096, 4096), (4096, 14_336), (10_240, 8192), (8192, 8192), (8192, 28_672)
    for rows, columns in shapes:
        chunks = columns // 256
        grid = tile_grid(default_tile(gpu, "int4", rows, chunks), rows, chunks)
        programs = -(-grid.tiles * grid.splits // gpu.multiprocessors)
        assert programs >= 2
        assert programs * grid.chunks_per_split <= 1.35 * rows / 64 * chunks / gpu.multiprocessors


def test_columns_in_another_order() -> None:
    weight = integers("int4", 24, 256, 32)
    weight.parts[COLUMN_ORDER] = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    made = repack(weight)
    x = random(2, 256)
    assert check_on_gpu("linear", lambda d: (x.to(d), made, None), torch.float32)


@pytest.mark.parametrize("form", ["int4", "int8", "plain"])
def test_no_foreign_memory_is_read_or_written(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN surrounds x, results and partial sums are initialized with NaN, and memory is restored at the end."""
    made = torch.full((9, 200), float("nan"), dtype=torch.bfloat16)
    x = made.view(-1)[200:1000].view(4, 200)
    x.copy_(random(4, 200))
    weight = random(37, 200).bfloat16() if form == "plain" else planes(form, 37, 200, 64)
    results: list[Tensor] = []
    empty = torch.empty

    def poisoned(*shape: int, **kind: Any) -> Tensor:
        if not all(shape):
            return empty(*shape, **kind)
        results.append(torch.full((prod(shape) + 64,), float("nan"), **kind))
        return results[-1][:-64].view(*shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    y = small_m_matmul(x, weight, None)
    assert y.isfinite().all() and results and all(result[-64:].isnan().all() for result in results)
    assert not ticket_counters(x.device).any()


def test_other_products_are_declined_with_a_reason() -> None:
    weight = planes("int4", 16, 64, 32)
    said = dict(explain("linear", torch.zeros(17, 64), weight, None))
    assert said["triton-skinny-planes"] == "17 rows, not 1 to 16"
    said = dict(explain("plain_linear", torch.zeros(1, 64), torch.zeros(3, 64, dtype=torch.float16), None))
    assert said["triton-skinny"] == "the weight is torch.float16, x torch.float32"


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_only_rows_of_the_same_kernels_must_have_the_same_bits_on_a_gpu(form: str) -> None:
    """tests/gpu compares steps of these numbers of rows bit by bit, padded to buckets of graphs, too."""
    x, group = meta_tensor(MORE, 4096), 128 if form == "int4" else None
    weight = meta_tensor(6144, 4096) if form == "bf16" else meta_packed_weight(form, 6144, 4096, group)

    def launched(rows: int) -> list[tuple[str, object]]:
        with record_launches(GPUS[90]) as launches:
            linear(x[:rows], weight)
        return [(launch.kernel.__name__, launch.grid) for launch in launches]

    buckets = {next(bucket for bucket in BATCH_BUCKETS if bucket >= count) for count in SAME_BITS}
    one = launched(1)
    assert one and all(launched(rows) == one for rows in {*SAME_BITS, *buckets})
    assert launched(MORE) != one


@pytest.mark.quick_every(6)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["int4", "int8", "plain"])
def test_a_norm_between_two_products_needs_no_kernel(form: str, dtype: torch.dtype) -> None:
    """The sums of squares come from several tiles, and the second product's columns are split among programs."""
    hidden, inner = 208, 272
    sizes = (hidden, inner), (inner, hidden)
    first, second = (
        random(*size).to(dtype) / 16 if form == "plain" else planes(form, *size, 16 if form == "int4" else None)
        for size in sizes
    )
    gamma = torch.rand(hidden, generator=torch.Generator().manual_seed(1)) + 0.5
    rows = 5 if INTERPRETED.value else 12  # more than 8 are padded to 16, and NumPy's sums depend on the padding
    x, bias, residual = random(rows, inner), random(hidden), 3 * random(rows, hidden)

    def both(rows: slice) -> tuple[Tensor, Tensor, Norm]:
        following = FollowingNorm(Norm(gamma, 1e-5))
        y = residual_linear(x[rows].to(dtype), (first,), bias.to(dtype), residual[rows].to(dtype), following)
        return y, fused_linear(y, (second,), norm=following.of(y), activation="silu"), following.of(y)

    def with_torch(d: torch.dtype) -> Tensor:
        w, v = (dequantize(m, d) if isinstance(m, QuantizedTensor) else m.to(d) for m in (first, second))
        y = residual.to(d) + (x.to(d) @ w.T + bias.to(d))
        wide = y.to(torch.promote_types(d, torch.float32))
        normed = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gamma).to(d)
        gate, up = (normed @ v.T).chunk(2, -1)
        return (F.silu(gate) * up).double()

    exact, plain = with_torch(torch.float64), with_torch(dtype)
    y, z, norm = both(slice(rows))
    assert isinstance(norm, PreparedNorm) and norm.x is y
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * inner**0.5)
    allowed = 2 * (plain - exact).abs().max() + rounding * exact.abs().max()
    assert (z.double() - exact).abs().max() <= allowed
    for row in range(0, rows, 4):  # alone: the same bits
        alone_y, alone_z, alone = both(slice(row, row + 1))
        assert torch.equal(alone_y, y[[row]]) and torch.equal(alone_z, z[[row]])
        assert isinstance(alone, PreparedNorm) and torch.equal(alone.squares, norm.squares[[row]])


def test_a_prepared_norm_normalizes_other_tensors_as_usual() -> None:
    weight, following = random(48, 64).float(), FollowingNorm(Norm(torch.rand(48), 1e-5))
    y = residual_linear(random(3, 64).float(), (weight,), None, None, following)
    norm, square = following.of(y), random(48, 48).float()
    assert isinstance(norm, PreparedNorm)
    norm.scaled.fill_(torch.nan)
    assert fused_linear(y, (square,), norm=norm).isnan().all()  # what was prepared is used
    others = fused_linear(y.clone(), (square,), norm=norm)
    assert torch.equal(others, fused_linear(y.clone(), (square,), norm=following.norm))


@pytest.mark.parametrize(
    ("rows", "dtype", "weighted", "norm_type", "reason"),
    [
        (1, torch.float16, True, "rms", "float16"),
        (17, torch.float32, True, "rms", "17 rows"),
        (1, torch.float32, True, "layer", "another norm"),
        (1, torch.float32, False, "rms", "another norm"),
    ],
)
def test_other_norms_are_left_to_the_next_product(
    rows: int, dtype: torch.dtype, weighted: bool, norm_type: Literal["rms", "layer"], reason: str
) -> None:
    norm = Norm(torch.ones(8) if weighted else None, 1e-5, norm_type)
    following = FollowingNorm(norm)
    arguments = (torch.zeros(rows, 64, dtype=dtype), (torch.zeros(8, 64, dtype=dtype),), None, None, following)
    assert reason in dict(explain("residual_linear", *arguments))["triton-skinny"]
    y = residual_linear(*arguments)
    assert following.of(y) is norm
