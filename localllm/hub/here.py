"""Every name under which a model lies on this machine, whole. Never the network."""

from collections.abc import Iterator
from pathlib import Path

from localllm.errors import LocalLLMError
from localllm.hub.aliases import aliases
from localllm.hub.catalog import entries
from localllm.hub.made import made_files
from localllm.hub.resolve import resolve
from localllm.hub.store import cached_models


def models_here() -> Iterator[tuple[str, Path]]:
    """Name, and folder or GGUF file: those of the catalogue, what else the cache of Hugging Face holds, and names
    that were given. One whose model is not here, or not whole, is none."""
    shown: set[Path] = set()
    for name in (entry.name for entry in entries()):
        if path := _whole(name):
            shown.add(path)
            yield name, path
    yield from ((name, path) for name, path in cached_models() if path not in shown)
    for name in dict.fromkeys([*aliases(), *made_files()]):
        if path := _whole(name):
            yield name, path


def _whole(name: str) -> Path | None:
    try:
        return resolve(name).path
    except LocalLLMError:
        return None
