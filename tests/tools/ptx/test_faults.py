"""Small kernels in PTX, correct in any order of threads; and with a fault planted in each, which the machine
finds.
"""

import weakref

import pytest
import torch
from torch import Tensor

from tools.ptx.device import Executable, SoftwareGpu
from tools.ptx.memory import (
    DivergenceError,
    Fault,
    MisalignedError,
    OutOfBoundsError,
    PrematureError,
    RaceError,
    UninitializedError,
)

SEEDS = range(6)
HEADER = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 p_x,
	.param .u64 .ptr .global .align 1 p_y,
	.param .u64 .ptr .global .align 1 p_z,
	.param .u32 p_n
)
.reqntid 64
{
	.reg .pred %p<9>;
	.reg .b32 %r<40>;
	.reg .b64 %rd<20>;
	ld.param.b64 %rd1, [p_x];
	ld.param.b64 %rd2, [p_y];
	ld.param.b64 %rd3, [p_z];
	ld.param.b32 %r9, [p_n];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mad.lo.s32 %r3, %r2, 64, %r1;   // number of the thread
	mad.wide.u32 %rd4, %r3, 4, %rd1;  // &x[number]
	mad.wide.u32 %rd5, %r3, 4, %rd2;  // &y[number]
"""

REVERSE = """
	ld.global.b32 %r4, [ %rd4 + 0 ];
	shl.b32 %r5, %r1, 2;
	mov.b32 %r6, global_smem;
	add.s32 %r7, %r6, %r5;
	st.shared.b32 [%r7], %r4;
	bar.sync 0;
	sub.s32 %r8, %r6, %r5;
	ld.shared.b32 %r10, [%r8+252];
	st.global.b32 [ %rd5 + 0 ], { %r10 };
	ret;
}
"""

# Two tiles of 64 words through two buffers; then a third tile into the first buffer.
PIPELINE = """
	mov.b32 %r6, global_smem;
	shl.b32 %r5, %r1, 2;
	add.s32 %r7, %r6, %r5;
	sub.s32 %r8, %r6, %r5;
	mov.b32 %r11, 4;
	cp.async.ca.shared.global [ %r7 + 0 ], [ %rd4 + 0 ], 0x4, %r11;
	cp.async.commit_group;
	cp.async.ca.shared.global [ %r7 + 256 ], [ %rd4 + 256 ], 0x4, %r11;
	cp.async.commit_group;
	cp.async.wait_group 1;
	bar.sync 0;
	ld.shared.b32 %r12, [%r8+252];
	bar.sync 0;
	cp.async.ca.shared.global [ %r7 + 0 ], [ %rd4 + 512 ], 0x4, %r11;
	cp.async.commit_group;
	cp.async.wait_group 1;
	bar.sync 0;
	ld.shared.b32 %r13, [%r8+508];
	cp.async.wait_group 0;
	bar.sync 0;
	ld.shared.b32 %r14, [%r8+252];
	add.s32 %r15, %r12, %r13;
	add.s32 %r16, %r15, %r14;
	st.global.b32 [ %rd5 + 0 ], { %r16 };
	ret;
}
"""

# Every block writes its part of y; the block that draws the last ticket adds up all parts, in x[n] .. x[n + 63].
TICKET = """
	ld.global.b32 %r4, [ %rd4 + 0 ];
	st.global.b32 [ %rd5 + 0 ], { %r4 };
	bar.sync 0;
	setp.eq.b32 %p1, %r1, 0;
	mov.b32 %r10, 1;
	@%p1 atom.global.gpu.acq_rel.add.u32 %r11, [ %rd3 + 0 ], %r10;
	mov.b32 %r6, global_smem;
	@%p1 st.shared.b32 [%r6], %r11;
	bar.sync 0;
	ld.shared.b32 %r12, [%r6];
	mov.u32 %r13, %nctaid.x;
	add.s32 %r14, %r13, -1;
	setp.ne.b32 %p2, %r12, %r14;
	@%p2 bra $L__END;
	mov.b32 %r15, 0;
	mov.b32 %r16, 0;
	mad.wide.u32 %rd6, %r1, 4, %rd2;
$L__LOOP:
	ld.global.b32 %r17, [ %rd6 + 0 ];
	add.s32 %r15, %r15, %r17;
	add.s64 %rd6, %rd6, 256;
	add.s32 %r16, %r16, 1;
	setp.lt.s32 %p3, %r16, %r13;
	@%p3 bra $L__LOOP;
	mad.wide.u32 %rd7, %r9, 4, %rd1;
	mad.wide.u32 %rd8, %r1, 4, %rd7;
	st.global.b32 [ %rd8 + 0 ], { %r15 };
	mov.b32 %r18, 0;
	@%p1 st.global.b32 [ %rd3 + 0 ], { %r18 };
$L__END:
	ret;
}
"""

INCREMENT = """
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	ld.global.b32 %r4, [ %rd4 + 0 ];
	add.s32 %r5, %r4, 1;
	st.global.b32 [ %rd5 + 0 ], { %r5 };
	ret;
}
"""

# Threads below n take one branch, the others another; all meet at the shuffle.
DIVERGE = """
	setp.lt.s32 %p1, %r1, %r9;
	@%p1 bra $L__LOW;
	mov.b32 %r4, 100;
	bra.uni $L__MEET;
$L__LOW:
	mov.b32 %r4, %r1;
$L__MEET:
	shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
	add.s32 %r6, %r5, %r4;
	st.global.b32 [ %rd5 + 0 ], { %r6 };
	ret;
}
"""

VECTOR = """
	mad.wide.u32 %rd6, %r1, 16, %rd1;
	mad.wide.u32 %rd7, %r1, 16, %rd2;
	ld.global.v4.b32 { %r10, %r11, %r12, %r13 }, [ %rd6 + 0 ];
	st.global.v4.b32 [ %rd7 + 0 ], { %r13, %r12, %r11, %r10 };
	ret;
}
"""


def run(
    body: str, *tensors: Tensor, n: int = 0, blocks: int = 1, seed: int = 0, gpu: SoftwareGpu | None = None
) -> SoftwareGpu:
    executable = Executable(HEADER + body, ("p_x", "p_y", "p_z", "p_n"), 512)
    unused = torch.zeros(1, dtype=torch.int32)
    x, y, z, *_ = (*tensors, unused, unused)
    gpu = gpu or SoftwareGpu(seed)
    gpu.execute(executable, (blocks,), {"p_x": x, "p_y": y, "p_z": z, "p_n": n}, early="griddepcontrol" in body)
    return gpu


def integers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def changed(body: str, old: str, new: str, count: int = 1) -> str:
    assert body.count(old) >= count
    return body.replace(old, new, count)


@pytest.mark.parametrize("seed", SEEDS)
def test_correct_kernels(seed: int) -> None:
    x, y = integers(192), torch.zeros(192, dtype=torch.int32)
    run(REVERSE, x, y, blocks=3, seed=seed)
    assert torch.equal(y.view(3, 64), x.view(3, 64).flip(1))
    run(PIPELINE, x, y[:64], seed=seed)
    assert torch.equal(y[:64], x.view(3, 64).sum(0).int().flip(0))
    sums = torch.cat([x, torch.zeros(64, dtype=torch.int32)])
    ticket = torch.zeros(1, dtype=torch.int32)
    run(TICKET, sums, y, ticket, n=192, blocks=3, seed=seed)
    assert torch.equal(sums[192:], x.view(3, 64).sum(0).int())
    assert not ticket.any()
    run(DIVERGE, x, y, n=5, seed=seed)
    values = torch.where(integers(64) < 5, integers(64), 100)
    assert torch.equal(y[:64], values + values.view(32, 2).flip(1).flatten())
    many, reversed_ = integers(256), torch.zeros(256, dtype=torch.int32)
    run(VECTOR, many, reversed_, seed=seed)
    assert torch.equal(reversed_.view(64, 4), many.view(64, 4).flip(1))


BARRIER = "	bar.sync 0;\n"
EARLY = (RaceError, UninitializedError)  # which one depends on the order of warps
PLANTED: dict[str, tuple[str, type[Fault] | tuple[type[Fault], ...]]] = {
    "a barrier removed": (changed(REVERSE, BARRIER, ""), EARLY),
    "a barrier of the warp alone": (changed(REVERSE, BARRIER, "	bar.warp.sync -1;\n"), EARLY),
    "a wait group off by one": (changed(PIPELINE, "wait_group 1", "wait_group 2"), RaceError),
    "the last wait off by one": (changed(PIPELINE, "wait_group 0", "wait_group 1"), RaceError),
    "no barrier after a wait": (changed(PIPELINE, "wait_group 1;\n" + BARRIER, "wait_group 1;\n"), EARLY),
    "a buffer filled while it is read": (
        changed(PIPELINE, "[%r8+252];\n" + BARRIER, "[%r8+252];\n"),
        RaceError,
    ),
    "a copy that is never committed": (changed(PIPELINE, "	cp.async.commit_group;\n", ""), RaceError),
    "a relaxed ticket": (changed(TICKET, "acq_rel", "relaxed"), RaceError),
    "a ticket that only acquires": (changed(TICKET, "acq_rel", "acquire"), RaceError),
    "a ticket that only releases": (changed(TICKET, "acq_rel", "release"), RaceError),
    "a ticket of the block's scope": (changed(TICKET, ".gpu.", ".cta."), RaceError),
    "a ticket before the block has written": (changed(TICKET, BARRIER, ""), RaceError),
    "threads that read a ticket too early": (
        changed(TICKET, "%r11;\n" + BARRIER, "%r11;\n"),
        EARLY,
    ),
    "an address beyond the end": (changed(REVERSE, "[ %rd5 + 0 ]", "[ %rd5 + 4 ]"), OutOfBoundsError),
    "an address before the beginning": (changed(REVERSE, "[ %rd4 + 0 ]", "[ %rd4 + -4 ]"), OutOfBoundsError),
    "an address beyond shared memory": (changed(REVERSE, "[%r8+252]", "[%r8+1020]"), OutOfBoundsError),
    "no address at all": (changed(REVERSE, "[ %rd4 + 0 ]", "[ 64 ]"), OutOfBoundsError),
    "an address in the middle of a word": (changed(REVERSE, "[%r8+252]", "[%r8+250]"), MisalignedError),
    "shared memory that nobody wrote": (
        changed(REVERSE, "	st.shared.b32 [%r7], %r4;\n", ""),
        UninitializedError,
    ),
    "values of several threads at one address": (
        changed(REVERSE, "st.shared.b32 [%r7]", "st.shared.b32 [%r6]"),
        RaceError,
    ),
    "a barrier in one branch": (changed(DIVERGE, "$L__LOW:\n", "$L__LOW:\n" + BARRIER), DivergenceError),
    "a shuffle in one branch": (
        changed(DIVERGE, "$L__LOW:\n", "$L__LOW:\n	shfl.sync.bfly.b32 %r7, %r1, 1, 31, -1;\n"),
        DivergenceError,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("seed", SEEDS)
def test_planted_faults(name: str, seed: int) -> None:
    body, fault = PLANTED[name]
    x, y, ticket = integers(256), torch.zeros(192, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    if body.startswith(REVERSE[:40]):
        x = x[:192]
    with pytest.raises(fault, match="kernel: `"):
        run(
            body,
            x.clone(),
            y,
            ticket,
            n=192 if "atom" in body else 5,
            blocks=3 if "cp.async" not in body else 1,
            seed=seed,
        )


def test_a_misaligned_vector() -> None:
    x, y = integers(258), torch.zeros(256, dtype=torch.int32)
    with pytest.raises(MisalignedError, match=r"16 bytes at byte \d+ of p_x"):
        run(VECTOR, x[2:], y)


def test_tensors_end_where_their_views_end() -> None:
    """Also where other tensors or columns of the same memory follow."""
    both, y = integers(128), torch.zeros(64, dtype=torch.int32)
    run(REVERSE, both[:64], y)
    with pytest.raises(OutOfBoundsError, match=r"4 bytes at byte 252 of p_x \(512 bytes\)"):
        run(REVERSE, both[:63], y)
    with pytest.raises(OutOfBoundsError):
        run(REVERSE, both.view(64, 2)[:, 0], y)


def test_memory_of_torch_empty_is_uninitialized() -> None:
    with SoftwareGpu() as gpu:
        x, y = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
        with pytest.raises(UninitializedError):
            run(REVERSE, x, y, gpu=gpu)
        x[:32] = 1
        with pytest.raises(UninitializedError):
            run(REVERSE, x, y, gpu=gpu)
        y.copy_(x)  # does not write to x
        with pytest.raises(UninitializedError):
            run(REVERSE, x, y, gpu=gpu)
        x[32:] = 2
        run(REVERSE, x, y, gpu=gpu)
        run(REVERSE, y, x, gpu=gpu)  # what a kernel has written can be read
    assert x.tolist() == [1] * 32 + [2] * 32


def test_a_kernel_that_starts_before_the_previous_one_has_ended() -> None:
    gpu = SoftwareGpu()
    x, y, z = integers(64), torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    run(INCREMENT, x, y, gpu=gpu)
    run(INCREMENT, y, z, gpu=gpu)
    assert torch.equal(z, x + 2)
    wait = "	griddepcontrol.wait;\n"
    early_read = changed(changed(INCREMENT, wait, ""), "	add.s32", wait + "	add.s32")
    run(early_read, x, z, gpu=gpu)  # nobody writes x
    with pytest.raises(PrematureError, match="reads p_x before it waits"):
        run(early_read, z, y, gpu=gpu)
    with pytest.raises(PrematureError, match="writes global memory"):
        run(changed(changed(INCREMENT, wait, ""), "	ret", wait + "	ret"), x, y, gpu=gpu)
    with pytest.raises(PrematureError):
        run(changed(INCREMENT, wait, ""), x, y, gpu=gpu)
    with pytest.raises(PrematureError, match="ends without waiting"):
        run("	ret;\n}\n// griddepcontrol", x, y, gpu=gpu)


def test_what_a_running_kernel_writes_is_not_reused_for_another_tensor() -> None:
    gpu, y = SoftwareGpu(), torch.zeros(64, dtype=torch.int32)
    run(INCREMENT, integers(64), y, gpu=gpu)
    written = weakref.ref(y)
    del y
    assert written() is not None
    run(INCREMENT, integers(64), torch.zeros(64, dtype=torch.int32), gpu=gpu)
    assert written() is None


def test_a_kernel_that_lets_the_next_start_before_it_has_waited() -> None:
    """Then the one before it may still run, too."""
    x, y, z = integers(64), torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    wait, trigger = "	griddepcontrol.wait;\n", "	griddepcontrol.launch_dependents;\n"
    early_read = changed(changed(INCREMENT, wait, ""), "	add.s32", wait + "	add.s32")
    for second, is_found in ((INCREMENT, False), (changed(INCREMENT, wait + trigger, trigger + wait), True)):
        gpu = SoftwareGpu()
        run(INCREMENT, x, y, gpu=gpu)
        run(second, x, z, gpu=gpu)
        if is_found:
            with pytest.raises(PrematureError):
                run(early_read, y, z, gpu=gpu)
        else:
            run(early_read, y, z, gpu=gpu)


def test_a_fault_names_instruction_and_line() -> None:
    located = changed(
        REVERSE, "	ld.shared", "	.loc	1 7 3                          // norms.py:7:3\n	ld.shared"
    )
    with pytest.raises(RaceError) as error:
        run(changed(located, BARRIER, ""), integers(64), torch.zeros(64, dtype=torch.int32))
    assert "`ld.shared.b32 %r10, [%r8+252]` (norms.py:7:3)" in str(error.value)
