"""`python tools/cpu_kernel_docs.py` compiles the product of one row for every variant of the CPU kernels.

Writes the instructions per byte of codes to docs/kernels.md. `--check` writes nothing, and ends with 1 if the page
differs.
"""

import re
import sys
from pathlib import Path

import llvmlite.binding as llvm
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.runtime.kernels.cpu import matmul_ir  # noqa: E402 (this tree, installed or not)
from localllm.runtime.kernels.cpu.compile import llvm_target, optimize  # noqa: E402
from localllm.runtime.kernels.cpu.ir import LANES, Program  # noqa: E402
from localllm.runtime.kernels.cpu.layout import InterleavedLayout  # noqa: E402
from localllm.runtime.kernels.cpu.matmul_ir import SplitFormat  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
MARKS = ("<!-- CPU instructions -->\n", "<!-- end of CPU instructions -->")
PLANES = 2  # 16 bits
TARGETS = {  # by variant: LLVM's triple, processor and features; of x86 those of `processor.target_of`
    "avx512vnni": ("x86_64-linux", "x86-64-v4", "+avx512vnni,-prefer-256-bit"),
    "avxvnni": ("x86_64-linux", "x86-64-v3", "+avxvnni"),
    "avx512bw": ("x86_64-linux", "x86-64-v4", "-prefer-256-bit"),
    "avx2": ("x86_64-linux", "x86-64-v3", ""),
    "i8mm": ("aarch64-linux", "neoverse-v1", ""),
    "dotprod": ("aarch64-linux", "neoverse-n1", ""),
    "generic": ("aarch64-linux", "cortex-a53", ""),
}
NAMES = {
    "avx512vnni": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx512bw": "AVX-512",
    "avx2": "AVX2",
    "i8mm": "NEON with matrix products",
    "dotprod": "NEON with dot products",
    "generic": "NEON",
}
FORMATS = {
    "Q4_0": InterleavedLayout(4, 32, torch.float16, False, False, 0),
    "Q4_K": InterleavedLayout(4, 32, torch.int8, False, True, 8),
    "Q6_K": InterleavedLayout(6, 16, torch.int8, False, False, 16),
    "Q8_0": InterleavedLayout(8, 32, torch.float16, False, False, 0),
}


def largest_block(assembly: str) -> int:
    """Return the instructions of the largest basic block: the loop over the steps of a row."""
    largest = count = 0
    for line in assembly.splitlines():
        if re.match(r"\.?\w+:", line):
            count = 0
        elif re.match(r"\t[^.#/]", line):  # no directive and no comment
            count += 1
            largest = max(largest, count)
    return largest


def instructions_per_byte(variant: str, layout: InterleavedLayout) -> float:
    triple, cpu, features = TARGETS[variant]
    program = Program("multiply", variant)
    split = SplitFormat.for_processor(variant, layout.bits, PLANES, 1)
    matmul_ir.emit_matmul(program, layout, split, 1, torch.float32, unpack=False)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    module = llvm.parse_assembly(program.to_llvm())
    optimize(module, machine)
    return largest_block(machine.emit_assembly(module)) / (layout.step_columns * layout.bits // 8 * LANES)


def table() -> str:
    llvm_target()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    rows = [f"| variant | {' | '.join(FORMATS)} |", "|---|" + "---:|" * len(FORMATS)]
    for variant, name in NAMES.items():
        cells = [f"{instructions_per_byte(variant, layout):.2f}" for layout in FORMATS.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(MARKS[0])
    fresh = before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]
    if "--check" in arguments:
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
