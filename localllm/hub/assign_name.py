"""Names that a person gives: whether one may be, what it will stand for, and giving and taking it."""

from pathlib import Path

from localllm.errors import ModelNotFound, UsageError
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.hub.local_names import delete_edition, find_edition, read_aliases, save_edition, set_alias
from localllm.hub.names import ALIAS_NAME, RepoName, is_path, parse_name, strip_latest
from localllm.hub.uploaded_blobs import remove_unused_uploads
from localllm.modelfile.edition import Edition


def validate_name(name: str) -> str:
    """The name without `:latest`. Raises UsageError for one that cannot be given."""
    name = name.removesuffix(":latest")
    if not ALIAS_NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a name", "use letters, digits, '.', '_', '-' and at most one colon")
    if name in catalog():
        raise UsageError(f"{name} is a model that `localllm list --all` knows", "choose another name")
    if is_path(name) and find_edition(name) is None:
        raise UsageError(f"{name} reads as the path of a file or folder", "choose another name")
    return name


def copy_name(name: str, source: str) -> str:
    """Let a name stand for what another stands for; gives what that is. Nothing of a model is copied.

    Raises UsageError as `check_name`, ModelNotFound as `lasting`.
    """
    name = validate_name(name)
    if edition := find_edition(strip_latest(source)):
        assign_edition(name, edition)
        return edition.source
    meant = durable_target(source)
    remove_name(name)
    set_alias(name, meant)
    return meant


def assign_edition(name: str, edition: Edition) -> None:
    """Let a name stand for an edition. name: as `check_name` gives it."""
    before = find_edition(name)
    if name in read_aliases():
        set_alias(name, None)
    save_edition(name, edition)
    if before and before.source != edition.source:
        remove_unused_uploads(before.source)


def remove_name(name: str) -> str | None:
    """Forget a name that was given; gives what it stood for, None where nobody gave it."""
    meant = assigned_target(name)
    if find_edition(name):
        delete_edition(name)
        remove_unused_uploads(str(meant))
    elif meant is not None:
        set_alias(name, None)
    return meant


def assigned_target(name: str) -> str | None:
    """What a name that was given stands for, None where nobody gave it."""
    edition = find_edition(name)
    return edition.source if edition else read_aliases().get(name)


def durable_target(source: str) -> str:
    """What a name stands for, wherever and whenever it is used. Raises ModelNotFound."""
    match parse_name(source):
        case RepoName() as repo:
            return str(repo)
        case CatalogEntry() as entry:
            return entry.name
        case Path() as path:
            if not path.exists():
                raise ModelNotFound(f"there is no folder or file {source}", "give the path of a model")
            return str(path.absolute())
