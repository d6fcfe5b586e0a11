"""Instructions as text, in every form that Triton and our inline assembly write them."""

import pytest

from tools.ptx.parser import Address, Guard, Immediate, Name, PtxSyntaxError, Register, Sink, Vector, parse

KERNEL = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1,
	.param .f32 kernel_param_2
)
.reqntid 128
{
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<3>;
	.reg .b32 	%r<5>;
	.reg .b64 	%rd<4>;
	.loc	1 97 9                          // step.py:97:9
$L__func_begin0:
	.pragma "nounroll";
	ld.param.b64 	%rd1, [kernel_param_0];  // a comment
	ld.param.b64 	%rd2, [kernel_param_1+0];
	@!%p2 bra 	$L__BB0_2;
	// begin inline asm
	{ .reg .b32 t; shr.u32 t, %r1, 8; mov.b32 %r2, t; }
	{
	.reg .b32 t, one;
	mov.b32 one, 0x3F803F80;
	mov.b32 t, -1;
	}
	// end inline asm
	mov.b32 	{_, %rs1}, %r3;
	add.s64 	%rd3, %rd2, 8;
$L__BB0_2:
	@%p1 st.global.v2.b32 [ %rd3 + -4 ], { %r1, 0f3F800000 };
	ret;
}
	.section	.debug_abbrev
	{
.b8 1                                   // Abbreviation Code
	}
"""


def test_a_kernel() -> None:
    program = parse(KERNEL)
    assert (program.name, program.threads) == ("kernel", 128)
    assert program.parameters == {"kernel_param_0": 64, "kernel_param_1": 64, "kernel_param_2": 32}
    assert program.labels == {"$L__func_begin0": 0, "$L__BB0_2": 9}
    load, _, branch, shift, move, one, minus, unpack, add, store, leave = program.instructions
    assert load.opcode == "ld.param.b64" and load.source == "step.py:97:9"
    assert load.operands[1] == Address(Name("kernel_param_0"), 0)
    assert branch.operands == (Name("$L__BB0_2"),) and branch.guard == Guard(Register(2, 1), True)
    assert shift.operands[0] == move.operands[1]  # t
    assert minus.operands[0] != shift.operands[0]  # another t
    assert one.operands[1] == Immediate(0x3F803F80) and minus.operands[1] == Immediate(-1)
    assert isinstance(unpack.operands[0], Vector) and unpack.operands[0].elements[0] == Sink()
    assert store.operands[0] == Address(add.operands[0], -4)  # pyright: ignore[reportArgumentType]
    assert isinstance(store.operands[1], Vector) and store.operands[1].elements[1] == Immediate(0x3F800000)
    assert (store.name, store.modifiers) == ("st", ("global", "v2", "b32")) and not leave.operands


def test_parameters_that_are_written_to_are_those_of_stores() -> None:
    assert parse(KERNEL).written_parameters == {"kernel_param_1"}
    assert parse(KERNEL.replace("%rd2, 8", "%rd1, 8")).written_parameters == {"kernel_param_0"}


def test_errors() -> None:
    with pytest.raises(PtxSyntaxError, match="fixed number of threads"):
        parse(KERNEL.replace(".reqntid 128\n", ""))
    with pytest.raises(PtxSyntaxError, match="not closed"):
        parse(KERNEL[: KERNEL.index("ret;")])
    with pytest.raises(PtxSyntaxError, match="not a statement"):
        parse(KERNEL.replace("ret;", "ret"))
