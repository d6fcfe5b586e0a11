"""Which files the one file consists of: Python, its library, localllm, and what localllm requires, from the
environment that runs this; so what was tested is what is packed.

Each file of a distribution is held against the digest that its wheel stated. Knows nothing of how they are packed.
"""

import base64
import fnmatch
import hashlib
import os
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIBRARY = PurePosixPath("lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
PACKAGES = LIBRARY / "site-packages"
PROGRAM = PurePosixPath("bin", "localllm")  # the interpreter, under the name that `ps` shows

Files = dict[PurePosixPath, Path]
"""Of each path in the one file, the file that it is a copy of."""


class CannotBuild(Exception):
    """This environment is not one to build from; the sentence says what helps."""


class LeftOut:
    """A part of left_out.toml, whose patterns have to prove that they are needed."""

    def __init__(self, part: str):
        self.reasons: dict[str, str] = tomllib.loads((Path(__file__).with_name("left_out.toml")).read_text())[part]
        self.unused = set(self.reasons)

    def __contains__(self, path: object) -> bool:
        fitting = [pattern for pattern in self.reasons if fnmatch.fnmatchcase(str(path), pattern)]
        self.unused.difference_update(fitting)
        return bool(fitting)

    def check(self) -> None:
        """Raises CannotBuild where a pattern has fitted nothing."""
        if self.unused:
            raise CannotBuild(f"nothing is called {', '.join(sorted(self.unused))}; take it out of left_out.toml")


def everything() -> Files:
    """Raises CannotBuild."""
    library, packages = LeftOut("python"), LeftOut("packages")
    found: Files = {PROGRAM: Path(os.path.realpath(sys.executable))}
    found |= python_library(library)
    for one in required():
        found |= files_of(one, packages)
    library.check()
    packages.check()
    return found | own_package()


def python_library(left_out: LeftOut) -> Files:
    at = Path(sysconfig.get_path("stdlib"))
    paths = (Path(folder, name).relative_to(at) for folder, _, names in os.walk(at) for name in names)
    return {LIBRARY / path.as_posix(): at / path for path in paths if path.as_posix() not in left_out}


def required() -> list[Distribution]:
    """What pyproject.toml asks for, and what that asks for, by name; as pip would, for this machine."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    left_out = LeftOut("distributions")
    found: dict[str, Distribution] = {}
    asked = [(line, "") for line in stated]
    seen = set[tuple[str, str]]()
    while asked:
        line, extra = asked.pop()
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name in left_out:
            continue
        found.setdefault(name, distribution(name))
        if found[name].version not in requirement.specifier:
            raise CannotBuild(f"{name} {found[name].version} is installed, and {line} is asked for; `make setup`")
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                asked += [(inner, wanted) for inner in found[name].requires or ()]
    left_out.check()
    return [found[name] for name in sorted(found)]


def files_of(one: Distribution, left_out: LeftOut) -> Files:
    """Those that it put into site-packages. Raises CannotBuild where one is not what its wheel brought."""
    found: Files = {}
    for path in one.files or ():
        if path.parts[0] == ".." or path.as_posix() in left_out:
            continue
        place = Path(str(one.locate_file(path)))
        check_digest(path, place)
        found[PACKAGES / path.as_posix()] = place
    if not found:
        raise CannotBuild(f"{one.name} has no list of its files; install it again with pip")
    return found


def check_digest(path: PackagePath, place: Path) -> None:
    if path.hash is None:
        return
    with place.open("rb") as file:
        digest = hashlib.file_digest(file, path.hash.mode).digest()
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != path.hash.value:
        raise CannotBuild(f"{place} is not what its wheel brought; install it again with pip")


def own_package() -> Files:
    """What a wheel of this tree has."""
    found = {PACKAGES / path.relative_to(ROOT).as_posix(): path for path in package_files(ROOT / "localllm")}
    return found | {PACKAGES / "localllm/models.toml": ROOT / "models.toml"}


def package_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
