"""Features of this processor, and which of them LOCALLLM_CPU lets the compiled kernels use."""

import functools
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping

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
    "dotprod": ("dotprod",),
    "generic": (),
}
INSTRUCTIONS = {  # as people write them
    "avx512vnni": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx512bw": "AVX-512",
    "avx2": "AVX2",
    "dotprod": "NEON with dot products",
    "generic": "those that every processor of its kind has",
}
NAMES = {"avxvnni": "x86-64-v3", "avx2": "x86-64-v3", "baseline": "x86-64"}  # LLVM's names


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


def kernel_instructions() -> str:
    """Return the instructions that products of packed weights use, and the processor's better ones if LOCALLLM_CPU
    denies them."""
    level, used = forced_level(), INSTRUCTIONS[byte_product(features())]
    if level == "baseline":
        used = "none: torch computes all"
    best = INSTRUCTIONS[byte_product(host_features())]
    return used if used == best else f"{used} (LOCALLLM_CPU={level}; the processor has {best})"


@functools.cache
def target_cpu() -> str:
    """Return LLVM's name of the processor that kernels are compiled for."""
    import llvmlite.binding as llvm

    level = forced_level()
    if level in NAMES and host_features().get("sse2"):  # levels have names only on x86
        return NAMES[level]
    return llvm.get_host_cpu_name()


def library_versions(libraries: Iterable[str]) -> dict[str, str | None]:
    """Return versions by name: localllm, Python, the libraries (None: not installed), and the system."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    own = {"localllm": __version__, "Python": platform.python_version()}
    return own | {name: version(name) for name in libraries} | {"system": platform.platform()}
