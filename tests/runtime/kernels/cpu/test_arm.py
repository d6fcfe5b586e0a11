"""Products of the ARM variants, compiled for ARM and run in an emulator (`qemu-aarch64` of Debian's qemu-user,
with gcc-aarch64-linux-gnu as linker), give the same bits as this processor.
"""

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import matmul_ir
from localllm.runtime.kernels.cpu.compile import llvm_target
from localllm.runtime.kernels.cpu.ir import Program
from localllm.runtime.kernels.cpu.layout import PART_NAMES, InterleavedLayout
from localllm.runtime.kernels.cpu.matmul_ir import SplitFormat
from localllm.runtime.kernels.cpu.quantized_matmul import matmul_integers
from tests.runtime.kernels.cpu.test_matmul_ir import weights
from tests.runtime.kernels.cpu.test_quantized_matmul import laned

EMULATOR, COMPILER = shutil.which("qemu-aarch64"), shutil.which("aarch64-linux-gnu-gcc")
pytestmark = pytest.mark.skipif(not (EMULATOR and COMPILER), reason="no emulator of ARM, or no linker for it")
PROCESSORS = {"i8mm": "neoverse-v1", "dotprod": "neoverse-n1", "generic": "cortex-a53"}

# Reads counts and buffers, calls the program in one part, and writes the buffers back.
HARNESS = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
void program(int64_t *arguments, int64_t part, int64_t parts);
int main(void) {
    int64_t count, field[2], arguments[64], sizes[64];
    if (fread(&count, 8, 1, stdin) != 1) return 1;
    for (int64_t i = 0; i < count; i++) {
        if (fread(field, 8, 2, stdin) != 2) return 1;
        sizes[i] = field[0] ? field[1] : 0;
        arguments[i] = field[0] ? (int64_t)malloc(field[1] + 64) : field[1];
        if (sizes[i] && fread((void *)arguments[i], 1, sizes[i], stdin) != (size_t)sizes[i]) return 1;
    }
    program(arguments, 0, 1);
    for (int64_t i = 0; i < count; i++)
        if (sizes[i]) fwrite((void *)arguments[i], 1, sizes[i], stdout);
    return 0;
}
"""


def executable(program: Program, cpu: str, folder: Path) -> Path:
    llvm_target()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, reloc="pic")
    module = llvm.parse_assembly(program.to_llvm())
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    (folder / "program.o").write_bytes(machine.emit_object(module))
    (folder / "harness.c").write_text(HARNESS)
    assert COMPILER
    command = [COMPILER, "-static", "-O1", "-o", "run", "harness.c", "program.o"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "run"


def emulated(file: Path, *arguments: np.ndarray | int) -> list[np.ndarray]:
    """Run a kernel in the emulator, and return its buffers."""
    sent = struct.pack("<q", len(arguments))
    for argument in arguments:
        if isinstance(argument, int):
            sent += struct.pack("<qq", 0, argument)
        else:
            sent += struct.pack("<qq", 1, argument.nbytes) + argument.tobytes()
    assert EMULATOR
    received = subprocess.run([EMULATOR, str(file)], input=sent, capture_output=True, check=True).stdout
    buffers = []
    for argument in arguments:
        if not isinstance(argument, int):
            buffers.append(np.frombuffer(received[: argument.nbytes], argument.dtype))
            received = received[argument.nbytes :]
    return buffers


def product(variant: str, x: torch.Tensor, weight: QuantizedTensor, folder: Path) -> torch.Tensor:
    layout = InterleavedLayout.from_weight(weight)
    cpu, rows = PROCESSORS[variant], len(x)
    split = SplitFormat.for_processor(variant, layout.bits, 2, rows)
    splitting = Program("program", variant)
    matmul_ir.emit_split(splitting, torch.float32, layout.group, split)
    multiplying = Program("program", variant)
    matmul_ir.emit_matmul(multiplying, layout, split, rows, torch.float32, unpack=split.words)
    folders = [folder / name for name in ("split", "multiply")]
    for each in folders:
        each.mkdir()
    tiles, groups, _ = weight.parts["scale"].shape
    digits = np.zeros(split.column_bytes * x.numel(), np.int8)
    records = np.zeros(split.record_bytes * rows * groups, np.int8)
    file = executable(splitting, cpu, folders[0])
    _, digits, records = emulated(file, x.numpy(), digits, records, rows, rows, groups)
    parts = [
        weight.parts[name].contiguous().view(torch.int8).flatten().numpy() if name in weight.parts else 0
        for name in PART_NAMES
    ]
    file = executable(multiplying, cpu, folders[1])
    y = np.zeros(rows * tiles * 16, np.float32)
    found = emulated(file, digits, records, y, *parts, tiles, groups, rows)
    return torch.from_numpy(found[2].copy()).view(rows, -1)[:, : weight.shape[0]]


@pytest.mark.parametrize("variant", PROCESSORS)
@pytest.mark.parametrize("form", ["q4_0", "q4_k", "q8_0", "q6_k", "int4", "int8"])
def test_products_on_arm_have_the_same_bits(variant: str, form: str, tmp_path: Path) -> None:
    weight = laned(weights(form))
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[0, ::7], x[-1, ::5] = x.abs().max(), -x.abs().max()
    found = product(variant, x, weight, tmp_path)
    assert torch.equal(found, matmul_integers(x, replace(weight, activation_bits=16)))
