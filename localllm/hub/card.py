"""The licence that a model card states. Reads no more of a stranger's README than its first lines."""

import re
from pathlib import Path

FRONT_MATTER_LIMIT = 2**16  # characters
LICENSE_FIELD = re.compile(r"^license(_name)?:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$", re.MULTILINE)


def read_license(folder: Path) -> str | None:
    """`apache-2.0`, ... from the front matter of README.md; `license_name` where the licence is `other`."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(FRONT_MATTER_LIMIT)
    except OSError:
        return None
    if not text.startswith("---"):
        return None
    front = text[3:].partition("\n---")[0]
    found = {name or "license": value for name, value in LICENSE_FIELD.findall(front)}
    return found.get("_name", "other") if found.get("license") == "other" else found.get("license")
