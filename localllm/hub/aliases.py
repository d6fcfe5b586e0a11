"""Names that a person gave to models: `aliases.json` in LOCALLLM_HOME, each with what it stands for.

Knows no grammar of names; `names` reads them, and says which may be given.
"""

import json
from pathlib import Path

from localllm.errors import DamagedModel, UsageError
from localllm.files import read_json, write_atomic
from localllm.settings import Settings


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
