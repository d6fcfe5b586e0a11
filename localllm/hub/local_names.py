"""Editions of models that a person made (`localllm create`, `POST /api/create`), by name: one file each under
LOCALLLM_HOME/made.

No path is ever made of a name that was not looked up among the files, or checked by `names.ALIAS` before. Knows no
grammar of names.
"""

import json
from pathlib import Path

from localllm.errors import DamagedModel, UsageError
from localllm.files import read_json, write_atomic
from localllm.modelfile.edition import Edition, from_json, to_json
from localllm.settings import Settings

# Names that a person gave to models: `aliases.json` in LOCALLLM_HOME, each with what it stands for.
#
# Knows no grammar of names; `names` reads them, and says which may be given.


def read_aliases() -> dict[str, str]:
    """Each name with an ORG/REPO, a path from the root or a name of the catalogue; never another alias.

    Raises DamagedModel where the file holds anything else.
    """
    file = aliases_file()
    try:
        known = read_json(file)
    except DamagedModel as error:
        raise DamagedModel(error.message, "mend it, or delete it to forget all aliases") from error
    if not all(isinstance(source, str) for source in known.values()):
        raise DamagedModel(
            f"{file} is damaged: it holds more than names", "mend it, or delete it to forget all aliases"
        )
    return known


def set_alias(name: str, source: str | None) -> None:
    """Let a name stand for something else from now on, or with None for nothing.

    Raises UsageError where the file cannot be written, DamagedModel as `aliases`.
    """
    file = aliases_file()
    try:
        known = {other: meant for other, meant in read_aliases().items() if other != name}
        known |= {name: source} if source is not None else {}
        write_atomic(file, json.dumps(known, ensure_ascii=False, indent=1))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", "check the disk and the rights") from error


def aliases_file() -> Path:
    return Settings.from_environment().home / "aliases.json"


EDITION_SUFFIX = ".json"
COLON_IN_FILE_NAME = "+"  # of a name in the name of its file: no name has it


def edition_files() -> dict[str, Path]:
    """Each name with its file."""
    folder = editions_folder()
    return {
        file.name.removesuffix(EDITION_SUFFIX).replace(COLON_IN_FILE_NAME, ":"): file
        for file in sorted(folder.glob(f"[!.]*{EDITION_SUFFIX}"))
    }


def find_edition(name: str) -> Edition | None:
    """None where nobody made one of that name. Raises DamagedModel where its file is no edition."""
    file = edition_files().get(name)
    if file is None:
        return None
    try:
        return from_json(read_json(file))
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise DamagedModel(f"{file} is damaged: {error}", f"delete it to forget {name}") from error


def save_edition(name: str, edition: Edition) -> None:
    """The name stands for this edition now. name: checked. Raises UsageError where nothing can be written."""
    file = editions_folder() / f"{name.replace(':', COLON_IN_FILE_NAME)}{EDITION_SUFFIX}"
    try:
        write_atomic(file, json.dumps(to_json(edition), ensure_ascii=False, indent=1))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", "check the disk and the rights") from error


def delete_edition(name: str) -> None:
    """Raises UsageError where the file cannot be removed."""
    file = edition_files()[name]
    try:
        file.unlink()
    except OSError as error:
        raise UsageError(f"{file} cannot be removed: {error.strerror}", "check the rights") from error


def editions_folder() -> Path:
    return Settings.from_environment().home / "made"
