"""Names that users assign on this machine: editions (`localllm create`, `POST /api/create`), one file each in
LOCALLLM_HOME/made, and aliases (`localllm cp`), all in LOCALLLM_HOME/aliases.json.

`names.py` parses names and `assign_name.py` validates new ones; a path is only made of a name after that, or from
the listed files.
"""

import json
from pathlib import Path

from localllm.errors import DamagedModel, UsageError
from localllm.files import explain_disk_errors, read_json, write_atomic
from localllm.modelfile.edition import Edition, from_json, to_json
from localllm.settings import Settings

EDITION_SUFFIX = ".json"
COLON_IN_FILE_NAME = "+"  # replaces the colon of a name in its file name; no name contains it
WRITABLE_HOME = "set LOCALLLM_HOME to a folder that can"  # remedy


def find_edition(name: str) -> Edition | None:
    """Return the edition with this name, if there is one. Raises DamagedModel if its file cannot be parsed."""
    file = edition_files().get(name)
    if file is None:
        return None
    try:
        return from_json(read_json(file))
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise DamagedModel(f"{file} is damaged: {error}", f"delete it to remove the name {name}") from error


def save_edition(name: str, edition: Edition) -> None:
    """Write an edition under a validated name. Raises NotWritable, DiskFull, or UsageError for other reasons."""
    _write(editions_folder() / f"{name.replace(':', COLON_IN_FILE_NAME)}{EDITION_SUFFIX}", to_json(edition))


def delete_edition(name: str) -> None:
    """Delete the file of an edition. Raises NotWritable, or UsageError if it cannot be removed."""
    file = edition_files()[name]
    try:
        with explain_disk_errors(file.parent, WRITABLE_HOME):
            file.unlink()
    except OSError as error:
        raise UsageError(f"{file} cannot be removed: {error.strerror}", "check the permissions") from error


def edition_files() -> dict[str, Path]:
    """Return the file of each edition by name."""
    return {
        file.name.removesuffix(EDITION_SUFFIX).replace(COLON_IN_FILE_NAME, ":"): file
        for file in sorted(editions_folder().glob(f"[!.]*{EDITION_SUFFIX}"))
    }


def editions_folder() -> Path:
    return Settings.from_environment().home / "made"


def read_aliases() -> dict[str, str]:
    """Return the target of each alias: ORG/REPO, an absolute path or a catalogue name; never another alias.

    Raises DamagedModel if the file contains anything else.
    """
    file, remedy = aliases_file(), "correct it, or delete it to remove all aliases"
    try:
        aliases = read_json(file)
    except DamagedModel as error:
        raise DamagedModel(error.message, remedy) from error
    if not all(isinstance(target, str) for target in aliases.values()):
        raise DamagedModel(f"{file} is damaged: it contains a value that is not a string", remedy)
    return aliases


def set_alias(name: str, target: str | None) -> None:
    """Set the target of an alias, or remove the alias with None.

    Raises the errors of `save_edition` and `read_aliases`.
    """
    aliases = {other: value for other, value in read_aliases().items() if other != name}
    _write(aliases_file(), aliases | ({name: target} if target is not None else {}))


def aliases_file() -> Path:
    return Settings.from_environment().home / "aliases.json"


def _write(file: Path, content: object) -> None:
    try:
        with explain_disk_errors(file.parent, WRITABLE_HOME):
            write_atomic(file, json.dumps(content, ensure_ascii=False, indent=1))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error.strerror}", "check the disk and permissions"
        ) from error
