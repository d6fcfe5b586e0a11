"""Which files a model folder must have, and which it may have."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.files import TOKENIZER_FILES, damaged_file, read_json
from localllm.hub.gguf import is_gguf, missing_part
from localllm.hub.sentence_transformers import MODULES_FILE, SETTINGS_FILES, read_modules

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    MODULES_FILE,
    *SETTINGS_FILES,
    "README.md",  # states the licence
)
TEMPLATES_FOLDER = "additional_chat_templates"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def missing_files(folder: Path) -> list[str]:
    """The files that a model needs and that are not in this folder; empty if it can be loaded.

    Instead of the folder any file of a GGUF model may be given.

    Raises UnsupportedModel and DamagedModel as `weight_files` does.
    """
    if is_gguf(folder):
        missing = missing_part(folder)
        return [missing.name] if missing else []
    tokenizer = next((name for name in TOKENIZER_FILES if (folder / name).is_file()), TOKENIZER_FILES[0])
    beside = [file for module in read_modules(folder) for file in module.files]
    needed = ["config.json", tokenizer, *beside, *weight_files(folder)]
    return [name for name in needed if not (folder / name).is_file()]


def weight_files(folder: Path) -> list[str]:
    """The names of the folder's safetensors files, here or not: those of its index, or the only one.

    Raises UnsupportedModel where there are only pickled weights, DamagedModel for an index that names anything
    but safetensors files beside it.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.is_file():
        return files_in_index(read_json(index), index)
    if not single.is_file():
        refuse_pickles(sorted(path.name for path in folder.iterdir() if is_pickle(path.name)), folder)
    return [single.name]


def files_in_index(content: Mapping[str, Any], index: PurePath) -> list[str]:
    """The files that an index names."""
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise damaged_file(index, "it names no weight files")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise damaged_file(index, f"it names {name!r}, which is no safetensors file beside it")
    return sorted(set(names.values()))


def is_pickle(name: str) -> bool:
    return name.endswith(PICKLE_SUFFIXES)


def refuse_pickles(names: Sequence[str], location: object) -> None:
    """Raises UnsupportedModel if there are any."""
    if names:
        raise UnsupportedModel(
            f"{location} holds only pickled weights ({names[0]}), which can run code when they are opened",
            "use a repository that has model.safetensors",
        )


# The licence that a model card states. Reads no more of a stranger's README than its first lines.

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
