"""GGUF models as files: one, or parts with the names that llama.cpp gives them. Which of several is meant.

Works on names alone where it can, because the files may still be on the Hub.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

from localllm.errors import ModelNotFound

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAGIC = b"GGUF"
COMPANION_WORDS = (
    "mmproj",
    "imatrix",
    "mtp-",
)  # in names of files beside the model: what sees, statistics, drafters
QUANT_NAME = re.compile(
    r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32)(?=[-._]|$)", re.IGNORECASE
)
DYNAMIC_PREFIX = "UD-"  # of Unsloth's editions of a format, which keep some tensors in more bits
DEFAULT_QUANT = "Q4_K_M"  # what most people run: a third of the size in 16 bits, at little cost

AnyPath = TypeVar("AnyPath", bound=PurePath)


def is_gguf(path: Path) -> bool:
    """By its first bytes: Ollama keeps its models under names without a suffix. A file of that suffix that begins
    otherwise is a damaged one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def part_files(path: AnyPath) -> Iterator[AnyPath]:
    """All files of the model that this file is of, here or not. Their count is a stranger's: stop at the first
    that is missing."""
    named = PART_NAME.fullmatch(path.name)
    if not named:
        yield path
        return
    stem, _, count = named.groups()
    for number in range(1, int(count) + 1):
        yield path.with_name(f"{stem}-{number:05}-of-{count}.gguf")


def missing_part(path: Path) -> Path | None:
    return next((part for part in part_files(path) if not part.is_file()), None)


def model_name(path: PurePath) -> str:
    named = PART_NAME.fullmatch(path.name)
    return named[1] if named else path.stem


def quant_tag(path: PurePath) -> str | None:
    """`Q4_K_M` of `Qwen3-4B-Q4_K_M.gguf`: the last such word of its name; None where it has none."""
    starts = [
        m for m in QUANT_NAME.finditer(model_name(path)) if m.start() == 0 or path.name[m.start() - 1] in "-._"
    ]
    return starts[-1][0].upper() if starts else None


def distinct_models(files: Iterable[AnyPath]) -> list[AnyPath]:
    """One file, the first, of each GGUF model among these."""
    found: dict[PurePath, AnyPath] = {}
    for file in sorted(files):
        if file.suffix == ".gguf" and not any(word in file.name.lower() for word in COMPANION_WORDS):
            found.setdefault(file.with_name(model_name(file)), file)
    return list(found.values())


def models_in_folder(folder: Path) -> list[Path]:
    """One file of each GGUF model in a folder."""
    return distinct_models(file for file in folder.glob("*.gguf") if file.is_file())


def models_in_snapshot(snapshot: Path) -> list[Path]:
    """The same of a repository, where models of several parts often have folders of their own."""
    files = [*snapshot.glob("*.gguf"), *snapshot.glob("*/*.gguf")]
    return distinct_models(file for file in files if file.is_file())  # a link may lead nowhere


def choose_model(models: list[AnyPath], quant: str | None, location: str) -> AnyPath:
    """The model that `quant` names (`Q4_K_M`, or the name of a file); without it Q4_K_M, or the only one. Where
    there is no such file, UD-Q4_K_M is taken for Q4_K_M, and the reverse.

    location: the repository or folder, for the message. Raises ModelNotFound that lists them where none or several
    could be meant.
    """
    wanted = (quant or DEFAULT_QUANT).upper()
    named = [model for model in models if _matches(model, wanted)]
    if not named and QUANT_NAME.fullmatch(
        wanted
    ):  # its twin: the same format, other tensors in more bits, or the reverse
        twin = (
            wanted.removeprefix(DYNAMIC_PREFIX) if wanted.startswith(DYNAMIC_PREFIX) else DYNAMIC_PREFIX + wanted
        )
        named = [model for model in models if _matches(model, twin)]
    if len(named) == 1:
        return named[0]
    if not quant and not named and len(models) == 1:
        return models[0]
    state = f"has no model {quant}" if quant and not named else "holds several models"
    raise ModelNotFound(
        f"{location} {state}", f"name one of them: {', '.join(f':{tag}' for tag in model_tags(models))}"
    )


def model_tags(models: Sequence[PurePath]) -> list[str]:
    """What to call each of several: its quantization, or its path where that alone would not tell them apart."""
    tags = [quant_tag(model) or model.name for model in models]
    return [tag if tags.count(tag) == 1 else str(model) for tag, model in zip(tags, models, strict=True)]


def _matches(model: PurePath, wanted: str) -> bool:
    names = (quant_tag(model) or "", model.name, model_name(model), str(model))
    return wanted in (name.upper() for name in names)
