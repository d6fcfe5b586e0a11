"""The required and optional files of a model's folder, and the licence in its README.md."""

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
FRONT_MATTER_LIMIT = 2**16  # characters
LICENSE_FIELD = re.compile(r"^license(_name)?:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$", re.MULTILINE)


def missing_files(path: Path) -> list[str]:
    """Return the required files that a model lacks; it can be loaded if there are none.

    path: the model's folder, or any file of a GGUF model. Raises UnsupportedModel and DamagedModel as
    `weight_files`.
    """
    if is_gguf(path):
        part = missing_part(path)
        return [part.name] if part else []
    tokenizer = next((name for name in TOKENIZER_FILES if (path / name).is_file()), TOKENIZER_FILES[0])
    of_modules = [file for module in read_modules(path) for file in module.files]
    required = ["config.json", tokenizer, *of_modules, *weight_files(path)]
    return [name for name in required if not (path / name).is_file()]


def weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files, present or not: those in its index, or the only one.

    Raises UnsupportedModel if all weights are pickled, DamagedModel if the index names anything but safetensors
    files next to it.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.is_file():
        return files_in_index(read_json(index), index)
    if not single.is_file():
        refuse_pickles(sorted(path.name for path in folder.iterdir() if is_pickle(path.name)), folder)
    return [single.name]


def files_in_index(content: Mapping[str, Any], index: PurePath) -> list[str]:
    """Return the weight files named in the content of an index. Raises DamagedModel like `weight_files`."""
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise damaged_file(index, "it names no weight files")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise damaged_file(index, f"it names {name!r}, which is not a safetensors file next to it")
    return sorted(set(names.values()))


def is_pickle(name: str) -> bool:
    return name.endswith(PICKLE_SUFFIXES)


def refuse_pickles(names: Sequence[str], location: object) -> None:
    """Raise UnsupportedModel if there are any names of pickled files."""
    if names:
        raise UnsupportedModel(
            f"{location} has only pickled weights ({names[0]}), which can execute code when they are opened",
            "use a repository that has model.safetensors",
        )


def read_license(folder: Path) -> str | None:
    """Return the licence stated in the front matter of README.md, such as `apache-2.0`, or its `license_name` if
    the licence is `other`. Only the beginning of the file, which is untrusted, is read."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(FRONT_MATTER_LIMIT)
    except OSError:
        return None
    if not text.startswith("---"):
        return None
    front_matter = text[3:].partition("\n---")[0]
    fields = {suffix or "license": value for suffix, value in LICENSE_FIELD.findall(front_matter)}
    return fields.get("_name", "other") if fields.get("license") == "other" else fields.get("license")
