"""Instructions that a warp executes together, against the manual's definition for each thread."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.ptx.test_faults import integers, run
from tools.ptx import tensor_core

SHUFFLE = """
	shfl.sync.{mode}.b32 %r5|%p1, %r1, {b}, {c}, -1;
	selp.b32 %r6, 1000, 0, %p1;
	add.s32 %r7, %r5, %r6;
	st.global.b32 [ %rd5 + 0 ], {{ %r7 }};
	ret;
}}
"""


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("b", [0, 1, 3, 16, 31])
@pytest.mark.parametrize("c", [0, 31, 0x181F, 0x1C1F, 0x1800, 0x0F0F])
def test_shuffles(mode: str, b: int, c: int) -> None:
    """The pseudocode of the manual."""

    def source(lane: int) -> tuple[int, bool]:
        segment, limit = c >> 8 & 31, c & 31
        highest = (lane & segment) | (limit & ~segment & 31)
        lowest = lane & segment
        match mode:
            case "up":
                j, valid = lane - b, lane - b >= highest
            case "down":
                j, valid = lane + b, lane + b <= highest
            case "bfly":
                j, valid = lane ^ b, lane ^ b <= highest
            case _:
                j = lowest | (b & ~segment & 31)
                valid = j <= highest
        return (j if valid else lane), valid

    y = torch.zeros(64, dtype=torch.int32)
    run(SHUFFLE.format(mode=mode, b=b, c=c), integers(64), y)
    for thread in range(64):
        lane, valid = source(thread % 32)
        assert y[thread] == thread - thread % 32 + lane + 1000 * valid


REDUCTION = """
	ld.global.b32 %r4, [ %rd4 + 0 ];
	redux.sync.{operation} %r5, %r4, -1;
	setp.lt.s32 %p1, %r4, 0;
	vote.sync.ballot.b32 %r6, %p1, -1;
	st.global.b32 [ %rd5 + 0 ], {{ %r5 }};
	st.global.b32 [ %rd5 + 256 ], {{ %r6 }};
	ret;
}}
"""


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.s32", lambda x: x.sum(1)),
        ("min.s32", lambda x: x.amin(1)),
        ("max.s32", lambda x: x.amax(1)),
        ("max.u32", lambda x: torch.tensor((x.numpy().view(np.uint32).max(1)).view(np.int32))),
    ],
)
def test_reductions_and_votes(operation: str, expected: object) -> None:
    x = torch.randint(-(2**20), 2**20, (64,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    y = torch.zeros(128, dtype=torch.int32)
    run(REDUCTION.format(operation=operation), x, y)
    assert torch.equal(y[:64].view(2, 32)[:, 0], expected(x.view(2, 32)).int())  # pyright: ignore
    assert (y[:64].view(2, 32) == y[:64].view(2, 32)[:, :1]).all()
    ballots = [sum(int(v < 0) << i for i, v in enumerate(warp)) for warp in x.view(2, 32).tolist()]
    assert (y[64:].view(2, 32)[:, 0].numpy().view(np.uint32) == ballots).all()


MATRICES = """
	ld.global.b32 %r4, [ %rd4 + 0 ];
	shl.b32 %r5, %r1, 2;
	mov.b32 %r6, global_smem;
	add.s32 %r7, %r6, %r5;
	st.shared.b32 [%r7], %r4;
	bar.sync 0;
	and.b32 %r8, %r1, 7;
	shl.b32 %r10, %r8, 4;
	add.s32 %r11, %r6, %r10;
	ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{ {registers} }}, [%r11{offset}];
	st.global.b32 [ %rd5 + 0 ], {{ %r20 }};
	ret;
}}
"""


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(trans: str) -> None:
    """Thread t receives elements 2 (t % 4) and the next of row t // 4, or of column t // 4."""
    x, y = integers(64), torch.zeros(64, dtype=torch.int32)
    matrix = x.view(torch.int16)[:64].view(8, 8)
    run(MATRICES.format(count=1, trans=trans, registers="%r20", offset=""), x, y)
    for t in range(32):
        row, column = t // 4, 2 * (t % 4)
        pair = [matrix[row, column + i] if not trans else matrix[column + i, row] for i in (0, 1)]
        assert y[t] == int(pair[0]) % 2**16 | int(pair[1]) << 16


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_m16n8k16(kind: str) -> None:
    """Fragments as in the manual: a0, a1 at row t // 4 and columns 2 (t % 4); a2, a3 8 rows below; a4 .. a7 8
    columns on.
    """
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(shape, generator=generator) for shape in ((16, 16), (16, 8), (16, 8)))
    a, b = a.to(dtype), b.to(dtype)
    a_parts, b_parts, c_parts = (np.zeros((1, 32, n), np.uint32) for n in (4, 2, 4))

    def bits(x: Tensor) -> int:
        return int(x.view(torch.int16)) % 2**16

    for t in range(32):
        group, member = t // 4, t % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            column = 2 * member + (i & 1) + (8 if i >= 4 else 0)
            a_parts[0, t, i // 2] |= np.uint32(bits(a[row, column]) << 16 * (i & 1))
        for i in range(4):
            row = 2 * member + (i & 1) + (8 if i >= 2 else 0)
            b_parts[0, t, i // 2] |= np.uint32(bits(b[row, group]) << 16 * (i & 1))
            c_parts[0, t, i] = c[group + (8 if i >= 2 else 0), 2 * member + (i & 1)].numpy().view(np.uint32)
    shape = tensor_core.mma_shape(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32")
    d = tensor_core.multiply(shape, a_parts, b_parts, c_parts).view(np.float32)
    expected = a.double() @ b.double() + c
    for t in range(32):
        for i in range(4):
            exact = float(expected[t // 4 + (8 if i >= 2 else 0), 2 * (t % 4) + (i & 1)])
            assert abs(d[0, t, i] - exact) <= 2.0**-22 * max(1, abs(exact))


def test_mma_sums_are_not_a_number_only_where_a_factor_is_none() -> None:
    a, b, c = (np.zeros((1, 32, n), np.uint32) for n in (4, 2, 4))
    a[0, 0, 0] = 0x7FC0  # row 0
    shape = tensor_core.mma_shape("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    d = tensor_core.multiply(shape, a, b, c)
    assert (d[0, :4, :2] == 0x7FFFFFFF).all()
    assert not d[0, 4:].any() and not d[0, :4, 2:].any()
