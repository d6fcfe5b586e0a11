"""The parts of an embedder as sentence-transformers keeps them beside its config.json: which there are, and their
files. Knows nothing of what they compute."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.files import JSON_LIMIT, damaged

MODULES = "modules.json"
SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MOST_MODULES = 16
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Module:
    kind: str  # Transformer, Pooling, Dense, Normalize
    folder: str  # beside modules.json; empty: that one itself

    @property
    def files(self) -> tuple[str, ...]:
        """Those that it needs, from the model's folder on."""
        names = {"Pooling": (CONFIG,), "Dense": (CONFIG, WEIGHTS)}.get(self.kind, ())
        return tuple(f"{self.folder}/{name}" for name in names)


def read_modules(folder: Path) -> tuple[Module, ...]:
    """Of a model's folder; () where it has no modules.json. Raises as `parse_modules`."""
    file = folder / MODULES
    if not file.is_file():
        return ()
    if file.stat().st_size > JSON_LIMIT:
        raise damaged(file, "it is larger than any list of modules")
    return parse_modules(file.read_bytes(), file)


def parse_modules(content: bytes, file: PurePath) -> tuple[Module, ...]:
    """Raises DamagedModel for what is no list of modules, or names a folder elsewhere, and UnsupportedModel for
    modules that do not run."""
    try:
        listed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is not valid JSON ({error})") from None
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_MODULES:
        raise damaged(file, "it is no list of modules")
    found = [module(each, file) for each in listed]
    check_order([one.kind for one in found], file)
    return tuple(found)


def module(entry: Any, file: PurePath) -> Module:
    kind, folder = (entry.get(name) if isinstance(entry, dict) else None for name in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(folder, str):
        raise damaged(file, "it has a module without a type or a path")
    kind = kind.rpartition(".")[2]
    if folder and not FOLDER.fullmatch(folder):
        raise damaged(file, f"it names {folder!r}, which is no folder beside it")
    if bool(folder) == (kind == "Transformer"):
        raise UnsupportedModel(f"{file} keeps its {kind} in {folder!r}", "use an edition in the usual form")
    return Module(kind, folder)


def check_order(kinds: Sequence[str], file: PurePath) -> None:
    """Vectors always are of length one here, so it does not matter whether Normalize is there."""
    if kinds[:1] != ["Transformer"] or "Pooling" not in kinds[1:2] or {*kinds[2:]} - {"Dense", "Normalize"}:
        raise UnsupportedModel(
            f"{file} is made of {', '.join(kinds)}", "Transformer, Pooling, Dense and Normalize in this order run"
        )
    if "Normalize" in kinds[:-1]:
        raise UnsupportedModel(f"{file} goes on after Normalize", "use an edition in the usual form")
