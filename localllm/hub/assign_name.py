"""Assigns local names to editions and models, copies them and removes them."""

from pathlib import Path

from localllm.errors import ModelNotFound, UsageError
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.hub.local_names import delete_edition, find_edition, read_aliases, save_edition, set_alias
from localllm.hub.names import ALIAS_NAME, RepoName, is_path, parse_name, strip_latest
from localllm.hub.resolve import edition_in_cache
from localllm.hub.uploaded_blobs import remove_unused_uploads
from localllm.modelfile.edition import Edition


def validate_name(name: str) -> str:
    """Return the name without `:latest`. Raises UsageError if it cannot be assigned."""
    name = name.removesuffix(":latest")
    if not ALIAS_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name", "use letters, digits, '.', '_', '-' and at most one colon"
        )
    if name in catalog():
        raise UsageError(f"{name} is already a name of `localllm list --all`", "choose another name")
    if is_path(name) and find_edition(name) is None:
        raise UsageError(f"{name} would be read as the path of a file or folder", "choose another name")
    return name


def copy_name(name: str, source: str) -> str:
    """Assign a name to what another name refers to, and return that. No files of the model are copied.

    Raises the errors of `validate_name` and `durable_target`.
    """
    name = validate_name(name)
    if edition := find_edition(strip_latest(source)):
        assign_edition(name, edition)
        return edition.source
    target = durable_target(source)
    remove_name(name)
    set_alias(name, target)
    return target


def assign_edition(name: str, edition: Edition) -> None:
    """Assign a name, as returned by `validate_name`, to an edition, replacing an alias or edition of that name."""
    replaced = find_edition(name)
    if name in read_aliases():
        set_alias(name, None)
    save_edition(name, edition)
    if replaced and replaced.source != edition.source:
        remove_unused_uploads(replaced.source)


def remove_name(name: str) -> str | None:
    """Remove an alias or edition, and return what it referred to, or None if there is none of that name."""
    target = assigned_target(name)
    if find_edition(name):
        delete_edition(name)
        remove_unused_uploads(str(target))
    elif target is not None:
        set_alias(name, None)
    return target


def assigned_target(name: str) -> str | None:
    """Return what an alias or edition refers to, or None if there is none of that name."""
    edition = find_edition(name)
    return edition.source if edition else read_aliases().get(name)


def durable_target(source: str) -> str:
    """Return the repository, catalogue name or absolute path that a name refers to, which depends neither on other
    names nor on the working directory. Raises ModelNotFound."""
    match parse_name(source):
        case RepoName() as repo:
            return str(edition_in_cache(repo))
        case CatalogEntry() as entry:
            return entry.name
        case Path() as path:
            if not path.exists():
                raise ModelNotFound(f"there is no folder or file {source}", "give the path of a model")
            return str(path.absolute())
