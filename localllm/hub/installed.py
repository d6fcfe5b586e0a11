"""The models on this machine by every name that runs them. Never the network."""

from collections.abc import Iterator
from contextlib import suppress

from localllm.errors import LocalLLMError
from localllm.hub.aliases import read_aliases
from localllm.hub.catalog import boxed_folder, catalog_entries
from localllm.hub.folder import missing_files
from localllm.hub.made import edition_files
from localllm.hub.names import repo_of_entry
from localllm.hub.resolve import ModelRef, model_in_cache, resolve_model
from localllm.hub.store import cached_models


def installed_models() -> Iterator[ModelRef]:
    """Each with where it lies: those of the catalogue by its names, other ones of the cache by ORG/REPO, and under
    every name that a person gave or made. Only whole ones. Reads folders, so it takes a moment."""
    shown = set()
    for entry in catalog_entries():
        with suppress(LocalLLMError):  # one damaged folder must not hide the others
            path = model_in_cache(repo) if (repo := repo_of_entry(entry)) else boxed_folder(entry)
            if path and path.exists() and not missing_files(path):
                shown.add(path)
                yield ModelRef(entry.name, path)
    yield from (ModelRef(name, path) for name, path in cached_models() if path not in shown)
    for name in dict.fromkeys([*read_aliases(), *edition_files()]):
        with suppress(LocalLLMError):  # of what is not here
            yield ModelRef(name, resolve_model(name).path)
