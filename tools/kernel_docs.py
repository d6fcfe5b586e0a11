"""`python tools/kernel_docs.py` compiles every Triton kernel, as it would be launched at real shapes, for GPUs of
five architectures, none of which has to be here, and writes what each takes of one to docs/kernels.md.

Ends with 1 where a kernel spills registers, takes more shared memory than a block may have, or writes or leaves
before it has waited for the kernel before it. `--check` writes nothing, and takes only as many examples as it
takes to launch every kernel; `--check norms` of the kernels of that module, `--check --every norms` all of its
examples. `--triton FOLDER` compiles with the version of Triton that was installed there (`make triton`).
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if "--triton" in sys.argv:  # before the first import of triton
    option = sys.argv.index("--triton")
    sys.path.insert(0, sys.argv[option + 1])
    del sys.argv[option : option + 2]

import triton

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.runtime.kernels import gpu  # noqa: E402 (this tree, installed or not)
from localllm.runtime.kernels.gpu.launch import GPUS, record_launches  # noqa: E402
from tools import triton_aot  # noqa: E402
from tools.triton_aot import CompiledTriton  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
MARKS = ("<!-- kernels -->\n", "<!-- end -->")
PROCESSES = 2

Example = tuple[str, str]  # the module's name and the example's


def examples() -> Iterator[tuple[Example, Callable[[], object]]]:
    """Of each module that has some: what is launched, and a call that launches it with tensors of no device."""
    for module in pkgutil.iter_modules(gpu.__path__):
        found = importlib.import_module(f"{gpu.__name__}.{module.name}")
        for name, launch in getattr(found, "examples", tuple)():
            yield (module.name, name), launch


def fewest(modules: list[str]) -> Iterator[tuple[Example, Callable[[], object]]]:
    """Of the examples as many as it takes to launch every kernel, or each of these modules."""
    seen: set[str] = set()
    for example, launch in examples():
        if modules and example[0] not in modules:
            continue
        with record_launches(GPUS[90]) as launches:
            launch()
        names = {noted.kernel.__name__ for noted in launches}
        if names - seen:
            seen |= names
            yield example, launch


def compiled(example: Example) -> dict[int, list[CompiledTriton]]:
    """Its kernels in the order of their launch, for each architecture."""
    launch = dict(examples())[example]
    found = {}
    for arch, device in GPUS.items():
        with record_launches(device) as launches:
            launch()
        found[arch] = [triton_aot.compile_for(noted, arch) for noted in launches]
    return found


def table(found: dict[Example, dict[int, list[CompiledTriton]]]) -> str:
    """Return one row per kernel and example, below the compiler's version and the number of kernels that spill.

    A cell has warps, registers and KiB of shared memory for one architecture.
    """
    every = [kernel for by_arch in found.values() for kernels in by_arch.values() for kernel in kernels]
    spilling = {kernel.name for kernel in every if kernel.spilled_bytes}
    spills = f"{', '.join(sorted(spilling))} spill" if spilling else "no kernel spills"
    compiler = f"Compiled with Triton {triton.__version__}: {spills} registers."
    head = ["kernel", "example", *(f"sm_{arch}" for arch in GPUS)]
    rows = [compiler, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for (_, example), by_arch in found.items():
        for name in dict.fromkeys(kernel.name for kernels in by_arch.values() for kernel in kernels):
            cells = [cell(kernel for kernel in kernels if kernel.name == name) for kernels in by_arch.values()]
            rows.append("| " + " | ".join([f"`{name}`", example, *cells]) + " |")
    return "\n".join(rows) + "\n"


def cell(kernels: Iterator[CompiledTriton]) -> str:
    """Of one kernel, which an example may launch several times, and not on every architecture."""
    each = dict.fromkeys(f"{k.warps} · {k.registers} · {k.shared_bytes / 1024:.3g}" for k in kernels)
    return ", ".join(each) or "none"


def render(page: str, rows: str) -> str:
    """The page with a fresh table."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def faults(found: dict[Example, dict[int, list[CompiledTriton]]]) -> list[str]:
    every = ((example, k) for example, by_arch in found.items() for ks in by_arch.values() for k in ks)
    return [
        f"{k.name} ({example}) on sm_{k.arch}: {k.spilled_bytes} bytes spilled, {k.shared_bytes} of shared "
        f"memory, before it waits: {', '.join(sorted(k.premature_instructions)) or 'nothing'}"
        for (_, example), k in every
        if not k.fits or k.premature_instructions
    ]


def main(arguments: list[str]) -> int:
    check, modules = "--check" in arguments, [each for each in arguments if not each.startswith("--")]
    chosen = fewest(modules) if check and "--every" not in arguments else examples()
    every = [example for example, _ in chosen if not modules or example[0] in modules]
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = dict(zip(every, pool.map(compiled, every), strict=True))
    if not check:
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), table(found)), encoding="utf-8")
    fit = f"{len(every)} examples fit on {len(GPUS)} architectures, compiled by Triton {triton.__version__}"
    print("\n".join(faults(found)) or fit)
    return int(bool(faults(found)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
