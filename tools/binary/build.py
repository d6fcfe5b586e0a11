"""`make binary`: dist/localllm, one file with Python, localllm and all that it requires, for Linux on x86-64.

Needs a C compiler, binutils, zstd with its static library, and an environment whose torch is for processors alone.
"""

import argparse
import compileall
import os
import platform
import py_compile
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.binary import kernels, libraries  # noqa: E402
from tools.binary.collect import LIBRARY, PACKAGES, PROGRAM, CannotBuild, Files, everything  # noqa: E402
from tools.binary.pack import pack  # noqa: E402

ARGUMENTS = ("-I", "-X", "utf8", "-m", "localllm")  # nothing from outside, and UTF-8 in every locale
SOURCES = ("launcher.c", "payload.c", "parts.c", "unpack.c")
STRIPPED = (PROGRAM.parent, LIBRARY / "lib-dynload", PurePosixPath("lib"), PACKAGES / "llvmlite/binding")
"""Folders in which symbols for debuggers are taken out. Libraries that were rewritten for their wheel, as numpy's,
do not survive it."""


def build_launcher(to: Path) -> None:
    """Raises CannotBuild without a C compiler or a static libzstd."""
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    flags = ["-std=c17", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-s"]
    try:
        subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", to, *sources, "-lzstd"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        remedy = "install gcc, libc6-dev, zstd and libzstd-dev"
        raise CannotBuild(f"the launcher does not compile ({error}); {remedy}") from error


def fill(tree: Path, files: Files) -> str:
    """Copy the files, stripped and with the libraries that they need, and compile Python to bytecode. Returns the
    oldest version of glibc that runs them."""
    if tree.exists():
        shutil.rmtree(tree)
    for path, source in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, tree / path)
        (tree / path).chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    came_from = {tree / path: source for path, source in files.items()}
    for library in libraries.add_libraries(tree, came_from):
        print(f"library {library.name}")
    elves = [path for path in came_from if libraries.is_elf(path)]
    stripped = [path for path in elves if PurePosixPath(path.relative_to(tree)).parent in STRIPPED]
    subprocess.run(["strip", "--strip-unneeded", *stripped], check=True)
    libraries.point_at(tree / "lib", elves)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(tree / LIBRARY, maxlevels=64, quiet=2, invalidation_mode=mode, stripdir=str(tree))
    return libraries.least_glibc(elves)


def tell_sizes(tree: Path, target: Path) -> None:
    """The larger parts, unpacked."""
    sizes = Counter[str]()
    for path in tree.rglob("*"):
        if path.is_file():
            sizes[part_of(PurePosixPath(path.relative_to(tree)))] += path.stat().st_size
    for name, size in sizes.most_common(16):
        print(f"{size / 1e6:8.1f} MB  {name}")
    count = sum(1 for path in tree.rglob("*") if path.is_file())
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB  in {count} files")
    print(f"{target.stat().st_size / 1e6:8.1f} MB  {target}")


def part_of(path: PurePosixPath) -> str:
    if path.is_relative_to(PACKAGES):
        top = path.relative_to(PACKAGES).parts[0]
        return top.removesuffix(".libs") if not top.endswith(".dist-info") else "licences and metadata"
    return "Python's library" if path.is_relative_to(LIBRARY) else "interpreter and shared libraries"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "localllm")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "binary", help="a folder for what is packed")
    parser.add_argument("--level", type=int, default=19, help="of zstd, 1 to 19")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    import torch

    try:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise CannotBuild("the one file is for Linux on x86-64; build it there")
        if torch.version.cuda or torch.version.hip:
            raise CannotBuild("this torch is for GPUs and takes gigabytes; install its build for processors alone")
        asked.work.mkdir(parents=True, exist_ok=True)
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        tree, launcher = asked.work / "tree", asked.work / "launcher"
        build_launcher(launcher)
        glibc = fill(tree, everything())
        print(f"needs glibc {glibc} or later")
        kernels.add_kernels(tree, PROGRAM, ARGUMENTS)
    except CannotBuild as error:
        sys.exit(f"error: {error}")
    pack(tree, launcher, asked.output, PROGRAM, ARGUMENTS, glibc=glibc, level=asked.level, jobs=asked.jobs)
    tell_sizes(tree, asked.output)


if __name__ == "__main__":
    main()
