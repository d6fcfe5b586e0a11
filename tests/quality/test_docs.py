import dataclasses
from pathlib import Path
from typing import get_args, get_type_hints

from localllm.quality.report import Quality

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"


def fields(kind: type) -> set[str]:
    """Names of all fields of a dataclass, including those of nested dataclasses."""
    found = set()
    for name, hint in get_type_hints(kind).items():
        found.add(name)
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                found |= fields(part)
    return found


def test_every_field_is_on_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## `--json` and `quality.json`")[1]
    missing = {name for name in fields(Quality) if f"`{name}`" not in table}
    assert missing == set()
