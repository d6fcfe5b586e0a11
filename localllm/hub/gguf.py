"""Names of GGUF files: parts of a split model as llama.cpp names them, quantization tags, choosing among models.

Most functions work on names alone, because the files may still be on the Hub.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

from localllm.errors import ModelNotFound

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAGIC = b"GGUF"
COMPANION_WORDS = ("mmproj", "imatrix", "mtp-")  # in names of vision projectors, calibration data, draft models
QUANT_NAME = re.compile(
    r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32)(?=[-._]|$)", re.IGNORECASE
)
DYNAMIC_PREFIX = "UD-"  # Unsloth's variants of a format, with more bits for some tensors
DEFAULT_QUANT = "Q4_K_M"  # the usual choice: a third of the size in 16 bits, with little loss

AnyPath = TypeVar("AnyPath", bound=PurePath)


def is_gguf(path: Path) -> bool:
    """Whether the path is a file with the suffix `.gguf`, which may be damaged, or with GGUF's magic number, as
    Ollama stores models without a suffix."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def part_files(path: AnyPath) -> Iterator[AnyPath]:
    """Yield all parts of the model that the file belongs to, present or not. The untrusted file name determines
    their number, so callers must stop at the first missing one."""
    match = PART_NAME.fullmatch(path.name)
    if not match:
        yield path
        return
    stem, _, count = match.groups()
    for number in range(1, int(count) + 1):
        yield path.with_name(f"{stem}-{number:05}-of-{count}.gguf")


def missing_part(path: Path) -> Path | None:
    """Return the first part of a GGUF model that does not exist."""
    return next((part for part in part_files(path) if not part.is_file()), None)


def model_name(path: PurePath) -> str:
    """Return the file name without suffix and part number."""
    match = PART_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def quant_tag(path: PurePath) -> str | None:
    """Return the last quantization in a file name, `Q4_K_M` for `Qwen3-4B-Q4_K_M.gguf`, or None."""
    matches = [
        m for m in QUANT_NAME.finditer(model_name(path)) if m.start() == 0 or path.name[m.start() - 1] in "-._"
    ]
    return matches[-1][0].upper() if matches else None


def distinct_models(files: Iterable[AnyPath]) -> list[AnyPath]:
    """Return the first file of each GGUF model among the files."""
    models: dict[PurePath, AnyPath] = {}
    for file in sorted(files):
        if file.suffix == ".gguf" and not any(word in file.name.lower() for word in COMPANION_WORDS):
            models.setdefault(file.with_name(model_name(file)), file)
    return list(models.values())


def models_in_folder(folder: Path) -> list[Path]:
    """Return the first file of each GGUF model in a folder."""
    return distinct_models(file for file in folder.glob("*.gguf") if file.is_file())


def models_in_snapshot(snapshot: Path) -> list[Path]:
    """Return the first file of each GGUF model in a snapshot, including subfolders, which often contain parts."""
    files = [*snapshot.glob("*.gguf"), *snapshot.glob("*/*.gguf")]
    return distinct_models(file for file in files if file.is_file())  # a link may be broken


def choose_model(models: list[AnyPath], quant: str | None, location: str) -> AnyPath:
    """Return the model that matches `quant`, a quantization or file name; by default Q4_K_M, or the only model.

    If no model has the quantization, Unsloth's variant of it (UD-Q4_K_M for Q4_K_M) is returned, and vice versa.
    location: the repository or folder, for the message. Raises ModelNotFound with a list of the models if none or
    several match.
    """
    tag = (quant or DEFAULT_QUANT).upper()
    matches = [model for model in models if _matches(model, tag)]
    if not matches and QUANT_NAME.fullmatch(tag):
        variant = tag.removeprefix(DYNAMIC_PREFIX) if tag.startswith(DYNAMIC_PREFIX) else DYNAMIC_PREFIX + tag
        matches = [model for model in models if _matches(model, variant)]
    if len(matches) == 1:
        return matches[0]
    if not quant and not matches and len(models) == 1:
        return models[0]
    state = f"has no model {quant}" if quant and not matches else "contains several models"
    raise ModelNotFound(
        f"{location} {state}", f"use one of them: {', '.join(f':{tag}' for tag in model_tags(models))}"
    )


def model_tags(models: Sequence[PurePath]) -> list[str]:
    """Return a tag for each model: its quantization, or its path where several have the same one."""
    tags = [quant_tag(model) or model.name for model in models]
    return [tag if tags.count(tag) == 1 else str(model) for tag, model in zip(tags, models, strict=True)]


def _matches(model: PurePath, tag: str) -> bool:
    names = (quant_tag(model) or "", model.name, model_name(model), str(model))
    return tag in (name.upper() for name in names)
