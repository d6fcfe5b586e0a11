"""This machine's processor: its features, and which of them LOCALLLM_CPU lets the compiled kernels use; its
physical cores, without efficiency cores.

LLVM detects the features; cores are read from Linux's /sys/devices, or from macOS' sysctl.
"""

import functools
import importlib.metadata
import os
import platform
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from localllm import __version__
from localllm.errors import UsageError
from localllm.settings import Settings

# Features that a processor needs for a level, highest first. f16c is needed because kernels would otherwise call
# conversion functions that do not exist.
LEVELS = {
    "avx512": ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avxvnni": ("avx2", "f16c", "fma", "avxvnni"),
    "avx2": ("avx2", "f16c", "fma"),
    "baseline": (),
}
BEYOND = {  # prefixes of features that a level excludes
    "avx512": (),
    "avxvnni": ("avx512", "avx10", "amx", "avxvnniint", "avxifma", "avxneconvert"),
    "avx2": ("avx512", "avx10", "amx", "avxvnni", "avxifma", "avxneconvert"),
    "baseline": ("avx", "amx", "f16c", "fma", "xop", "vaes", "vpclmulqdq"),
}
# How a processor multiplies bytes, the fastest first, and the features that each way takes.
BYTE_PRODUCTS = {
    "avx512vnni": ("avx512vnni", "avx512bw"),
    "avxvnni": ("avxvnni", "avx2"),
    "avx512bw": ("avx512bw",),
    "avx2": ("avx2",),
    "i8mm": ("i8mm", "dotprod"),
    "dotprod": ("dotprod",),
    "generic": (),
}
NARROW_DTYPES = {"BF16": "bfloat16", "F16": "float16"}  # by safetensors' name
INSTRUCTIONS = {  # as people write them
    "avx512vnni": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx512bw": "AVX-512",
    "avx2": "AVX2",
    "i8mm": "NEON with matrix products",
    "dotprod": "NEON with dot products",
    "generic": "those that every processor of its kind has",
}
# LLVM's generic processor of each level, and the features that code is compiled for, so that all processors of a
# level share it. On Zen 5, the inner loops of 28 kernels are as long as with its own name and all of its features.
X86_TARGETS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3"}
X86_FEATURES = {
    "avx2": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2"),
    "avx512": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
SYSTEM = Path("/sys/devices")
# Share of the largest capacity, or of the highest clock, that a performance core has. Efficiency cores have a
# capacity of 0.25 to 0.45 on ARM, and a clock of 0.65 as compact cores of Zen 5; Intel lists its own. Clocks of
# performance cores differ by 0.05.
PERFORMANCE_CAPACITY, PERFORMANCE_CLOCK = 0.5, 0.7


@functools.cache
def forced_level() -> str | None:
    """Return the level that LOCALLLM_CPU names; None if it names none.

    Raises UsageError if the value is not a level or the processor does not reach it.
    """
    level = Settings.from_environment().cpu
    if level is not None and not reaches_level(host_features(), level):
        raise UsageError(
            f"LOCALLLM_CPU is {level!r}, but this processor does not support it", "name a lower level, or none"
        )
    return level


def reaches_level(features: Mapping[str, bool], level: str) -> bool:
    """Return whether a processor with these features reaches a level."""
    return all(features.get(feature) for feature in LEVELS[level])


def byte_product(features: Mapping[str, bool]) -> str:
    """Return how a processor with these features multiplies bytes, one of BYTE_PRODUCTS."""
    return next(name for name, needed in BYTE_PRODUCTS.items() if all(features.get(each) for each in needed))


def limit_features(features: Mapping[str, bool], level: str | None) -> dict[str, bool]:
    """Return the features, with those beyond a level set to False."""
    beyond = () if level is None else BEYOND[level]
    return {name: present and not name.startswith(beyond) for name, present in features.items()}


@functools.cache
def host_features() -> dict[str, bool]:
    """Return the features of this processor by LLVM's names; empty where LLVM cannot detect them."""
    import llvmlite.binding as llvm  # imported here so that commands that do not compute start without it

    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return {"neon": True, "dotprod": True}  # every processor of Apple's has them, and LLVM detects none there
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


@functools.cache
def features() -> dict[str, bool]:
    """Return the features that kernels may use, after LOCALLLM_CPU."""
    return limit_features(host_features(), forced_level())


def used_instructions() -> str:
    """Return the instructions that products of packed weights use."""
    return "none: torch computes all" if forced_level() == "baseline" else INSTRUCTIONS[byte_product(features())]


def kernel_instructions() -> str:
    """Return the instructions that products of packed weights use, and the processor's better ones if LOCALLLM_CPU
    denies them."""
    level, used = forced_level(), used_instructions()
    best = INSTRUCTIONS[byte_product(host_features())]
    return used if used == best else f"{used} (LOCALLLM_CPU={level}; the processor has {best})"


@functools.cache
def kernels_supported() -> bool:
    """Return whether this processor has the instructions that compiled kernels need, and is little-endian."""
    machine = platform.machine().lower()
    if forced_level() == "baseline":
        return False
    if machine in ("x86_64", "amd64"):
        return reaches_level(features(), "avx2")
    return machine in ("aarch64", "arm64")


def matrix_dtype_for(stored: str, dtype: str, device_type: str) -> str:
    """Return the dtype in which a dense matrix is kept that x of `dtype` is multiplied with.

    On a CPU, kernels widen 16 bits to float32 in registers, without a rounding: such matrices stay as stored.
    stored: by safetensors' name; device_type: `cpu`, for this machine's, or `cuda`
    """
    if device_type == "cpu" and dtype == "float32" and kernels_supported():
        return NARROW_DTYPES.get(stored, dtype)
    return dtype


class KernelTarget(NamedTuple):
    """What kernels are compiled for."""

    cpu: str  # LLVM's name
    flags: str  # of features, as LLVM takes them: +avx2,-avx512f
    byte_product: str  # one of BYTE_PRODUCTS


@functools.cache
def kernel_target() -> KernelTarget:
    """Return the target of this processor, after LOCALLLM_CPU."""
    return target_of(features())


def target_of(features: Mapping[str, bool]) -> KernelTarget:
    """Return the target of a processor with these features; on other processors than x86, of this one alone."""
    product = byte_product(features)
    level = next((level for level in X86_TARGETS if reaches_level(features, level)), None)
    if level is None:
        import llvmlite.binding as llvm

        flags = [("+" if present else "-") + name for name, present in sorted(features.items())]
        return KernelTarget(llvm.get_host_cpu_name(), ",".join(flags), product)
    names = [*X86_FEATURES["avx2"], *(X86_FEATURES["avx512"] if level == "avx512" else ())]
    vnni = {"avx512vnni", "avxvnni"} & set(BYTE_PRODUCTS[product])
    flags = [("+" if features.get(name) else "-") + name for name in sorted({*names, *vnni})]
    if level == "avx512":
        flags.append("-prefer-256-bit")  # kernels are written for vectors of 512 bits
    return KernelTarget(X86_TARGETS[level], ",".join(flags), product)


def count_cores(system: Path = SYSTEM) -> int | None:
    """Return the cores that this process may use, without efficiency cores; None where the system lists none.

    SMT siblings are one core: they share the units that multiply and the caches.
    """
    if platform.system() == "Darwin":
        return read_sysctl("hw.perflevel0.physicalcpu")
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    fast = allowed - efficiency_cpus(allowed, system)
    cores = {sibling_cpus(cpu, system) for cpu in fast}
    return len(cores) if all(cores) else None


def sibling_cpus(cpu: int, system: Path) -> tuple[int, ...]:
    """Return the logical processors of a processor's core; empty where the system does not list them."""
    topology = system / "system" / "cpu" / f"cpu{cpu}" / "topology"
    names = ("core_cpus_list", "thread_siblings_list")  # the second before Linux 5.3
    return next((tuple(cpus) for name in names if (cpus := read_cpu_list(topology / name))), ())


def efficiency_cpus(allowed: Collection[int], system: Path) -> set[int]:
    """Return the logical processors of efficiency cores, from the first of three sources that has some."""
    if listed := read_cpu_list(system / "cpu_atom" / "cpus"):  # Intel's hybrids
        return set(listed) if set(allowed) - set(listed) else set()
    for name, share in (("cpu_capacity", PERFORMANCE_CAPACITY), ("cpufreq/cpuinfo_max_freq", PERFORMANCE_CLOCK)):
        values = {cpu: read_number(system / "system" / "cpu" / f"cpu{cpu}" / name) for cpu in allowed}
        numbers = [value for value in values.values() if value is not None]
        slow = {cpu for cpu, value in values.items() if value is not None and value < share * max(numbers)}
        if slow:
            return slow
    return set()


def read_cpu_list(file: Path) -> list[int]:
    """Read a list such as 0-3,8; empty where there is none."""
    try:
        ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
        return [cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)]
    except (OSError, ValueError):
        return []


def read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def read_sysctl(name: str) -> int | None:
    """Read a number from macOS' sysctl; None where it is unknown, as on Macs with a processor of Intel."""
    import subprocess  # only macOS needs it, and commands that do not compute import this file

    try:
        return int(subprocess.run(["sysctl", "-n", name], capture_output=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def library_versions(libraries: Iterable[str]) -> dict[str, str | None]:
    """Return versions by name: localllm, Python, the libraries (None: not installed), and the system."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    own = {"localllm": __version__, "Python": platform.python_version()}
    return own | {name: version(name) for name in libraries} | {"system": platform.platform()}
