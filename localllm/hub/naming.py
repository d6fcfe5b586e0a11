"""Names that a person gives: whether one may be, what it will stand for, and giving and taking it."""

from pathlib import Path

from localllm.errors import ModelNotFound, UsageError
from localllm.hub.aliases import aliases, set_alias
from localllm.hub.blobs import drop_unused
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.hub.made import edition_of, forget, keep
from localllm.hub.names import ALIAS, RepoName, is_path, known_as, parse
from localllm.modelfile.edition import Edition


def check_name(name: str) -> str:
    """The name without `:latest`. Raises UsageError for one that cannot be given."""
    name = name.removesuffix(":latest")
    if not ALIAS.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a name", "use letters, digits, '.', '_', '-' and at most one colon")
    if name in catalog():
        raise UsageError(f"{name} is a model that `localllm list --all` knows", "choose another name")
    if is_path(name) and edition_of(name) is None:
        raise UsageError(f"{name} reads as the path of a file or folder", "choose another name")
    return name


def give(name: str, source: str) -> str:
    """Let a name stand for what another stands for; gives what that is. Nothing of a model is copied.

    Raises UsageError as `check_name`, ModelNotFound as `lasting`.
    """
    name = check_name(name)
    if edition := edition_of(known_as(source)):
        make(name, edition)
        return edition.source
    meant = lasting(source)
    take(name)
    set_alias(name, meant)
    return meant


def make(name: str, edition: Edition) -> None:
    """Let a name stand for an edition. name: as `check_name` gives it."""
    before = edition_of(name)
    if name in aliases():
        set_alias(name, None)
    keep(name, edition)
    if before and before.source != edition.source:
        drop_unused(before.source)


def take(name: str) -> str | None:
    """Forget a name that was given; gives what it stood for, None where nobody gave it."""
    meant = given(name)
    if edition_of(name):
        forget(name)
        drop_unused(str(meant))
    elif meant is not None:
        set_alias(name, None)
    return meant


def given(name: str) -> str | None:
    """What a name that was given stands for, None where nobody gave it."""
    edition = edition_of(name)
    return edition.source if edition else aliases().get(name)


def lasting(source: str) -> str:
    """What a name stands for, wherever and whenever it is used. Raises ModelNotFound."""
    match parse(source):
        case RepoName() as repo:
            return str(repo)
        case CatalogEntry() as entry:
            return entry.name
        case Path() as path:
            if not path.exists():
                raise ModelNotFound(f"there is no folder or file {source}", "give the path of a model")
            return str(path.absolute())
