"""Versions of localllm, Python and libraries."""

import importlib.metadata
import platform
from collections.abc import Iterable

from localllm import __version__


def library_versions(libraries: Iterable[str]) -> dict[str, str | None]:
    """Return versions by name: localllm, Python, the libraries (None: not installed), and the system."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    own = {"localllm": __version__, "Python": platform.python_version()}
    return own | {name: version(name) for name in libraries} | {"system": platform.platform()}
