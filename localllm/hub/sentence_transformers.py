"""The parts of an embedder as sentence-transformers keeps them beside its config.json: which there are, and their
files. Knows nothing of what they compute."""

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
    folder: str  # beside modules.json; empty: that one itself

    @property
    def files(self) -> tuple[str, ...]:
        """Those that it needs, from the model's folder on."""
        names = {"Pooling": (CONFIG_FILE,), "Dense": (CONFIG_FILE, WEIGHTS_FILE)}.get(self.module_type, ())
        return tuple(f"{self.folder}/{name}" for name in names)


def read_modules(folder: Path) -> tuple[ModuleEntry, ...]:
    """Of a model's folder; () where it has no modules.json. Raises as `parse_modules`."""
    file = folder / MODULES_FILE
    if not file.is_file():
        return ()
    if file.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file(file, "it is larger than any list of modules")
    return parse_modules(file.read_bytes(), file)


def parse_modules(content: bytes, file: PurePath) -> tuple[ModuleEntry, ...]:
    """Raises DamagedModel for what is no list of modules, or names a folder elsewhere, and UnsupportedModel for
    modules that do not run."""
    try:
        listed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged_file(file, f"it is not valid JSON ({error})") from None
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_MODULES:
        raise damaged_file(file, "it is no list of modules")
    found = [parse_module(each, file) for each in listed]
    check_order([one.module_type for one in found], file)
    return tuple(found)


def parse_module(entry: Any, file: PurePath) -> ModuleEntry:
    kind, folder = (entry.get(name) if isinstance(entry, dict) else None for name in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(folder, str):
        raise damaged_file(file, "it has a module without a type or a path")
    kind = kind.rpartition(".")[2]
    if folder and not FOLDER_NAME.fullmatch(folder):
        raise damaged_file(file, f"it names {folder!r}, which is no folder beside it")
    if bool(folder) == (kind == "Transformer"):
        raise UnsupportedModel(f"{file} keeps its {kind} in {folder!r}", "use an edition in the usual form")
    return ModuleEntry(kind, folder)


def check_order(module_types: Sequence[str], file: PurePath) -> None:
    """Vectors always are of length one here, so it does not matter whether Normalize is there."""
    if (
        module_types[:1] != ["Transformer"]
        or "Pooling" not in module_types[1:2]
        or {*module_types[2:]} - {"Dense", "Normalize"}
    ):
        raise UnsupportedModel(
            f"{file} is made of {', '.join(module_types)}",
            "Transformer, Pooling, Dense and Normalize in this order run",
        )
    if "Normalize" in module_types[:-1]:
        raise UnsupportedModel(f"{file} goes on after Normalize", "use an edition in the usual form")
