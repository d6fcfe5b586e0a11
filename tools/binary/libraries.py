"""The system's shared libraries that the collected files need, put beside them and found there by relative paths.

What glibc brings stays the system's: it and the loader belong together.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

GLIBC = re.compile(r"(ld-linux-x86-64|lib(c|m|dl|rt|pthread|util|resolv))\.so\.\d")
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
RPATH = re.compile(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]")
FOUND = re.compile(r"^\s*(\S+) => (/\S+)", re.MULTILINE)
VERSION = re.compile(r"\bGLIBC_(\d+)\.(\d+)\b")


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def needed(path: Path) -> list[str]:
    """The libraries that a program or library asks the loader for."""
    return NEEDED.findall(output("readelf", "-d", path))


def add_libraries(tree: Path, came_from: dict[Path, Path]) -> Iterator[Path]:
    """Copy into `tree/lib` what `tree` lacks, and yield it; `came_from`: where each file of the tree was before,
    as that is where its own libraries are looked for."""
    carried = {path.name for path in came_from}
    rest = [path for path in came_from if is_elf(path)]
    while rest:
        path = rest.pop()
        missing = {name for name in needed(path) if name not in carried and not GLIBC.fullmatch(name)}
        if not missing:
            continue
        places = dict(FOUND.findall(output("ldd", came_from[path])))
        for name in sorted(missing):
            copy = tree / "lib" / name
            shutil.copyfile(os.path.realpath(places[name]), copy)
            came_from[copy] = Path(places[name])
            carried.add(name)
            rest.append(copy)
            yield copy


def point_at(library: Path, paths: list[Path]) -> None:
    """Have those of the paths that need something in the folder look there, by an entry that also counts for what
    they load in turn, and before LD_LIBRARY_PATH. Absolute entries are of other machines and dropped."""
    there = {path.name for path in library.iterdir() if path.is_file()}
    for path in paths:
        entries = [entry for line in RPATH.findall(output("readelf", "-d", path)) for entry in line.split(":")]
        kept = [entry for entry in entries if entry.startswith("$ORIGIN")]
        if there.intersection(needed(path)):
            kept.append(f"$ORIGIN/{os.path.relpath(library, path.parent)}")
        if kept != entries:
            subprocess.run(["patchelf", "--force-rpath", "--set-rpath", ":".join(kept), path], check=True)


def least_glibc(paths: list[Path]) -> str:
    """The oldest that has all symbols asked for."""
    found = {tuple(map(int, pair)) for path in paths for pair in VERSION.findall(output("readelf", "-V", path))}
    return ".".join(map(str, max(found)))


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
