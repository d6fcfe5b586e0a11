"""The instructions that unpack pairs of 8-bit values on a GPU, emulated one by one."""

import re

import pytest
import torch

from localllm.quant.vectors import to_float32
from localllm.runtime.kernels.gpu.paged import SPLIT_FP8_ASM, SPLIT_INT8_ASM


@pytest.mark.parametrize(
    ("form", "asm"), [(torch.int8, SPLIT_INT8_ASM), (torch.float8_e4m3fn, SPLIT_FP8_ASM)], ids=str
)
def test_every_pair_is_unpacked_exactly(form: torch.dtype, asm) -> None:
    pairs = torch.arange(2**16)
    low, high = pairs, pairs.flip(0)  # of two tokens, in one register
    even, odd = carried_out(asm.value, low | high << 16)
    for lanes, shift in ((even, 0), (odd, 8)):
        for lane, pair in ((lanes & 0xFFFF, low), (lanes >> 16, high)):
            numbers = (pair >> shift & 0xFF).to(torch.uint8).view(form)
            assert torch.equal(of_bfloat16(lane), to_float32(numbers).double())


def carried_out(asm: str, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Execute the instructions, with 32-bit registers as int64."""
    registers = {"$2": pair}
    for line in asm.replace("\n", " ").strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        found = re.fullmatch(r"\s*([\w.]+) (.*)", line)
        assert found, line
        to, *names = found[2].split(", ")
        values = [registers[n] if n in registers else torch.tensor(int(n, 0)) for n in names]
        registers[to] = carry_out(found[1], values) & 0xFFFFFFFF
    return registers["$0"], registers["$1"]


def carry_out(instruction: str, values: list[torch.Tensor]) -> torch.Tensor:
    match instruction:
        case "mov.b32":
            return values[0]
        case "shl.b32":
            return values[0] << values[1]
        case "shr.u32":
            return values[0] >> values[1]
        case "and.b32":
            return values[0] & values[1]
        case "lop3.b32":
            assert values[3] == 0xEA
            return values[0] & values[1] | values[2]
        case "fma.rn.bf16x2":
            lanes = []
            for shift in (0, 16):
                a, b, c = (of_bfloat16(value >> shift & 0xFFFF) for value in values)
                bits = (a * b + c).bfloat16().view(torch.int16).long() & 0xFFFF
                lanes.append(bits << shift)
            return lanes[0] | lanes[1]
    raise AssertionError(instruction)


def of_bfloat16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).double()
