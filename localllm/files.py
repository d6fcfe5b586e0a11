"""JSON files of strangers: bounded, an object, and no key twice."""

import json
from pathlib import Path
from typing import Any

from localllm.errors import DamagedModel

# Where a folder has a tokenizer; the first that is there counts, as the model's own library goes by it.
TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model")
JSON_LIMIT = 64 * 2**20  # bytes; the largest real one, an index, has a few megabytes


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no such file. Raises DamagedModel for anything else."""
    if not file.is_file():
        return {}
    if file.stat().st_size > JSON_LIMIT:
        raise damaged(file, "it is larger than any configuration")
    return parse_json(file.read_bytes(), file)


def parse_json(content: bytes, file: Path) -> dict[str, Any]:
    """An object in which no key stands twice: what two readers understand differently is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise damaged(file, "a key stands in it twice")
        return fields

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(file, "it does not hold a JSON object")
    return value


def damaged(file: Path, why: str) -> DamagedModel:
    return DamagedModel(f"{file} is damaged: {why}", "fetch the model again")
