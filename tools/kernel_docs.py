"""Compiles every Triton kernel for GPUs that need not be here, and writes what they use to docs/kernels.md.

`python tools/kernel_docs.py` compiles the kernels as they are launched at real shapes, for five architectures of
NVIDIA. Exits with 1 if a kernel spills registers, needs more shared memory than a block may have, or writes or
exits before it has waited for the previous kernel. `--amd` compiles for three architectures of AMD instead, and
exits with 1 if a kernel needs more shared memory than a block may have. `--check` writes nothing, and compiles
only as many examples as launch every kernel once; `--check norms`: the kernels of that module; `--check --every
norms`: all of its examples. `--triton FOLDER` compiles with the Triton that is installed there (`make triton`).
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if "--triton" in sys.argv:  # before the first import of triton
    option = sys.argv.index("--triton")
    sys.path.insert(0, sys.argv[option + 1])
    del sys.argv[option : option + 2]

import torch
import triton

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
AMD = "--amd" in sys.argv
if AMD:  # as in ROCm's builds of torch; kernels are imported without NVIDIA's assembly then
    torch.version.hip = "compiled without"

from localllm.runtime.kernels import gpu  # noqa: E402 (this tree, installed or not)
from localllm.runtime.kernels.gpu.launch import AMD_GPUS, GPUS, Gpu, RecordedLaunch, record_launches  # noqa: E402
from tools.triton_aot import CompiledForAmd, CompiledTriton, compile_for, compile_for_amd  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
MARKS = (
    ("<!-- amd kernels -->\n", "<!-- end of amd kernels -->") if AMD else ("<!-- kernels -->\n", "<!-- end -->")
)
ARCHS = [*AMD_GPUS] if AMD else [f"sm_{arch}" for arch in GPUS]
PROCESSES = 2

Example = tuple[str, str]  # names of the module and of the example
Compiled = dict[str, list[CompiledTriton] | list[CompiledForAmd]]  # kernels in the order of their launch, by arch


def examples() -> Iterator[tuple[Example, Callable[[], object]]]:
    """Return each example with a call that launches its kernels with tensors on device `meta`."""
    for info in pkgutil.iter_modules(gpu.__path__):
        module = importlib.import_module(f"{gpu.__name__}.{info.name}")
        for name, launch in getattr(module, "examples", tuple)():
            yield (info.name, name), launch


def fewest_examples(modules: list[str]) -> Iterator[Example]:
    """Return as few examples as launch every kernel, of all modules if none is named."""
    seen: set[str] = set()
    for example, launch in examples():
        if modules and example[0] not in modules:
            continue
        with record_launches(GPUS[90]) as launches:
            launch()
        names = {recorded.kernel.__name__ for recorded in launches}
        if names - seen:
            seen |= names
            yield example


def compile_example(example: Example) -> Compiled:
    launch = dict(examples())[example]
    if AMD:
        recorded = {arch: record(launch, device) for arch, device in AMD_GPUS.items()}
        if "--check" in sys.argv:  # a kernel at one shape: what it takes of shared memory follows from its tile
            recorded = {arch: [*{x.kernel: x for x in launches}.values()] for arch, launches in recorded.items()}
        return {arch: [compile_for_amd(each, arch) for each in launches] for arch, launches in recorded.items()}
    launches = {arch: record(launch, device) for arch, device in GPUS.items()}
    return {f"sm_{arch}": [compile_for(each, arch) for each in found] for arch, found in launches.items()}


def record(launch: Callable[[], object], device: Gpu) -> list[RecordedLaunch]:
    with record_launches(device) as launches:
        launch()
    return launches


def format_table(compiled: dict[Example, Compiled]) -> str:
    """Return one row per kernel and example, below the compiler's version and the names of kernels that spill.

    A cell has warps, registers and KiB of shared memory for one architecture.
    """
    every = [kernel for by_arch in compiled.values() for kernels in by_arch.values() for kernel in kernels]
    spilling = sorted(
        {f"`{kernel.name}` on {kernel.arch}" if AMD else kernel.name for kernel in every if kernel.spills}
    )
    spills = f"{', '.join(spilling)} spill" if spilling else "no kernel spills"
    compiler = f"Compiled with Triton {triton.__version__}: {spills} registers."
    head = ["kernel", "example", *ARCHS]
    rows = [compiler, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for (_, example), by_arch in compiled.items():
        for name in dict.fromkeys(kernel.name for kernels in by_arch.values() for kernel in kernels):
            cells = [
                format_cell([kernel for kernel in kernels if kernel.name == name]) for kernels in by_arch.values()
            ]
            rows.append("| " + " | ".join([f"`{name}`", example, *cells]) + " |")
    return "\n".join(rows) + "\n"


def format_cell(kernels: Sequence[CompiledTriton | CompiledForAmd]) -> str:
    """kernels: launches of one kernel by an example, of which there may be several, or none on an architecture"""
    each = dict.fromkeys(f"{k.warps} · {k.registers} · {k.shared_bytes / 1024:.3g}" for k in kernels)
    return ", ".join(each) or "none"


def replace_table(page: str, rows: str) -> str:
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def find_faults(compiled: dict[Example, Compiled]) -> list[str]:
    return [
        f"{kernel.name} ({example}) on {kernel.fault}"
        for (_, example), by_arch in compiled.items()
        for kernels in by_arch.values()
        for kernel in kernels
        if kernel.fault
    ]


def main(arguments: list[str]) -> int:
    check, modules = "--check" in arguments, [each for each in arguments if not each.startswith("--")]
    chosen = fewest_examples(modules) if check and "--every" not in arguments else [each for each, _ in examples()]
    selected = [example for example in chosen if not modules or example[0] in modules]
    with ProcessPoolExecutor(PROCESSES) as pool:
        compiled = dict(zip(selected, pool.map(compile_example, selected), strict=True))
    if not check:
        PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), format_table(compiled)), encoding="utf-8")
    faults = find_faults(compiled)
    fit = f"{len(selected)} examples fit on {len(ARCHS)} architectures, compiled by Triton {triton.__version__}"
    print("\n".join(faults) or fit)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
