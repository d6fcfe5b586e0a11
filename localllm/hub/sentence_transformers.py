"""Parses modules.json, in which sentence-transformers lists the parts of an embedding model and their files."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.files import MAX_JSON_BYTES, damaged_file

MODULES_FILE = "modules.json"
SETTINGS_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MAX_MODULES = 16
FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ModuleEntry:
    module_type: str  # Transformer, Pooling, Dense, Normalize
    folder: str  # next to modules.json; empty: the folder of modules.json itself

    @property
    def files(self) -> tuple[str, ...]:
        """Required files, relative to the model's folder."""
        names = {"Pooling": (CONFIG_FILE,), "Dense": (CONFIG_FILE, WEIGHTS_FILE)}.get(self.module_type, ())
        return tuple(f"{self.folder}/{name}" for name in names)


def read_modules(folder: Path) -> tuple[ModuleEntry, ...]:
    """Return the modules of a model, or () if it has no modules.json. Raises the errors of `parse_modules`."""
    file = folder / MODULES_FILE
    if not file.is_file():
        return ()
    if file.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file(file, "it is too large for a list of modules")
    return parse_modules(file.read_bytes(), file)


def parse_modules(content: bytes, file: PurePath) -> tuple[ModuleEntry, ...]:
    """Parse modules.json. Raises DamagedModel if it is not a list of modules or names a folder elsewhere,
    UnsupportedModel for unsupported modules. file: for the messages."""
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged_file(file, f"it is not valid JSON ({error})") from None
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_MODULES:
        raise damaged_file(file, f"it is not a list of 1 to {MAX_MODULES} modules")
    modules = tuple(_parse_module(entry, file) for entry in entries)
    _check_order([module.module_type for module in modules], file)
    return modules


def _parse_module(entry: Any, file: PurePath) -> ModuleEntry:
    module_type, folder = (entry.get(name) if isinstance(entry, dict) else None for name in ("type", "path"))
    if not isinstance(module_type, str) or not isinstance(folder, str):
        raise damaged_file(file, "it has a module without a type or a path")
    module_type = module_type.rpartition(".")[2]
    if folder and not FOLDER_NAME.fullmatch(folder):
        raise damaged_file(file, f"its path {folder!r} is not a folder next to it")
    if bool(folder) == (module_type == "Transformer"):
        raise UnsupportedModel(
            f"{file} has its {module_type} in {folder!r}", "use a version of the model in the usual layout"
        )
    return ModuleEntry(module_type, folder)


def _check_order(module_types: Sequence[str], file: PurePath) -> None:
    """Check that the modules run in a supported order. Normalize is optional, as embeddings always have norm 1."""
    if (
        module_types[:1] != ["Transformer"]
        or "Pooling" not in module_types[1:2]
        or {*module_types[2:]} - {"Dense", "Normalize"}
    ):
        raise UnsupportedModel(
            f"{file} has the modules {', '.join(module_types)}",
            "Transformer, Pooling, Dense and Normalize are supported, in this order",
        )
    if "Normalize" in module_types[:-1]:
        raise UnsupportedModel(
            f"{file} has modules after Normalize", "use a version of the model in the usual layout"
        )
