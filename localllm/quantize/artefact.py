"""A quantized model as a Hugging Face folder that others read, too: written part by part, whole or not at all.

    NAME.partial/model-PART.safetensors   the parts that are done, each renamed into place when it is on the disk
    NAME.partial/parts/PART.json          how the matrices of a part are stored
    NAME.partial/states/                  what the quantizer needs to go on
    NAME.partial/recipe.json              what is made of what: a run that is broken off goes on by it
    NAME.partial/config.json              the last of all: with it the folder is whole, and becomes NAME

Tensors come under the names of `arch/layout.py`, as `Weights.take` gives them (a norm as it is stored), and leave
under those of the source's files. Experts that the source stacks are stored one by one. What no part brings is
copied. Knows nothing of how weights are quantized.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from localllm import __version__
from localllm.checkpoint.header import Header, read_safetensors_header
from localllm.errors import UsageError
from localllm.files import explain_disk_errors, read_json
from localllm.hub.card import read_license
from localllm.hub.folder import INDEX_FILE, TEMPLATES_FOLDER, weight_files
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.compressed import StorageScheme, choose_scheme, quantization_config, to_stored_tensors
from localllm.quantize.disk import DRAFT_SUFFIX, check_disk_space, fsync_path, write_durably
from localllm.quantize.expected import artefact_bytes
from localllm.quantize.recipe import Recipe
from localllm.quantize.shards import save_tensors
from localllm.quantize.source import PARTIAL_SUFFIX, RECIPE_FILE, check_source, hub_revision, source_identity

# What a model folder holds beside weights and config.json: tokenizer, templates, licence, and a card that says
# what became of the model. Copies no program of a stranger's. No torch.
COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt")
LEGAL_FILES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
EXCLUDED_FILES = ("config.json", INDEX_FILE, "recipe.json", "quality.json")
MODEL_CARD = "README.md"


def copy_companion_files(source: Path, target: Path, recipe: Recipe) -> None:
    folders = (source, source / TEMPLATES_FOLDER)
    for file in sorted(file for folder in folders if folder.is_dir() for file in folder.iterdir()):
        if file.is_file() and is_companion_file(file.name):
            place = target / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            write_durably(place, file.read_bytes())
    if license := read_license(source):
        write_durably(target / MODEL_CARD, write_model_card(source, license, recipe).encode())


def is_companion_file(name: str) -> bool:
    return name.upper().startswith(LEGAL_FILES) or (
        name.endswith(COMPANION_SUFFIXES) and name not in EXCLUDED_FILES
    )


def write_model_card(source: Path, license: str, recipe: Recipe) -> str:
    """The front matter that hubs and `localllm show` read, and a sentence."""
    revision = hub_revision(source)
    of = f"{revision[0]} at {revision[1]}" if revision else source.resolve().name
    base = f"base_model: {revision[0]}\nbase_model_relation: quantized\n" if revision else ""
    return f"---\nlicense: {license}\n{base}---\n\n{of}, quantized by localllm: {describe_recipe(recipe)}.\n"


def describe_recipe(recipe: Recipe) -> str:
    """`rtn, INT4 in groups of 128, symmetric, head INT8`"""
    group = f"in groups of {recipe.group}" if recipe.group else "with a scale a row"
    kind = "symmetric" if recipe.symmetric else "with zero points"
    head = f"head INT{recipe.head_bits}" if recipe.head_bits < 16 else "head as it was"
    activations = ["activations INT8"] if recipe.activations else []
    return ", ".join([recipe.method, f"INT{recipe.bits} {group}", kind, *activations, head])


# Where an artefact may be written: what is there and must not be lost. No torch.
LOCK_FILE = ".lock"


def check_target(folder: Path, *, force: bool) -> None:
    """Raises UsageError where something is at this place that an artefact must not replace, or for a place that
    has no name of its own."""
    if folder.name in ("", ".."):
        raise UsageError(f"{folder} is no name for a new folder", "name one, as in -o DIR")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / RECIPE_FILE).is_file():
        raise UsageError(f"{folder} is there and no model that localllm quantized", "name another folder")
    if not force:
        raise UsageError(f"{folder} is there", "name another folder, or add --force to replace it")


def clear_partial(partial: Path) -> None:
    """Empties a folder that is being written, but for its lock and what says that it is ours. Shards go before
    what is said of them: those that are left, whenever this ends, are whole."""
    for file in sorted(partial.iterdir(), key=Path.is_dir):
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in (LOCK_FILE, RECIPE_FILE):
            file.unlink()


PARTS, STATES, CONFIG_FILE = "parts", "states", "config.json"
REST_PART = "rest"  # the part of what is copied
STACKED_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<matrix>\w+_proj)(?:[._](?P<kind>weight|bias))?")
TIED_HEAD = "lm_head.weight"
MULTIMODAL_PREFIX = (
    "language_model.model."  # begins the names of a model within one that sees, which keeps its head
)


class Artefact:
    """One that is being written, by this process alone; `with` lets go of it.

    calibration: a digest of the text that statistics come from, where the recipe uses any; force: also in place of
    an artefact that is there, and instead of one that another recipe has begun.
    """

    def __init__(
        self,
        folder: Path,
        header: Header,
        recipe: Recipe,
        *,
        calibration: str | None = None,
        force: bool = False,
    ):
        """Raises UsageError where something else has the name, another process writes it or another recipe has
        begun it, or for a source that is quantized already; DiskFull."""
        check_source(header)
        check_target(folder, force=force)
        self.folder, self.header, self.recipe = folder, header, recipe
        self.partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        self.provenance = {
            **{"localllm": __version__, "source": source_identity(header.path), "recipe": asdict(recipe)},
            "calibration": calibration,
        }
        self.force = force
        with explain_disk_errors(self.partial, resumable=True):
            self.partial.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.partial / LOCK_FILE, timeout=0)
            try:
                self.lock.acquire()
            except Timeout:
                raise UsageError(f"another process is writing {folder}", "wait for it, or end it") from None
            try:
                self._begin()
            except BaseException:
                self.close()
                self._leave_nothing()
                raise

    def _begin(self) -> None:
        begun = read_json(self.partial / RECIPE_FILE)
        strange = [
            file.name for file in self.partial.iterdir() if file.name != LOCK_FILE and file.suffix != DRAFT_SUFFIX
        ]
        if strange and not begun:
            raise UsageError(f"{self.partial} is there and was not begun by localllm", "name another folder")
        if self.done and begun != self.provenance and not self.force:
            raise UsageError(
                f"{self.partial} was begun from another source or with another recipe",
                f"--force begins anew; to keep it, name another folder than {self.folder}",
            )
        if begun != self.provenance:
            clear_partial(self.partial)
        written = sum(file.stat().st_size for file in self.partial.glob("*.safetensors"))
        check_disk_space(self.partial, artefact_bytes(self.header, self.recipe) - written)
        if begun != self.provenance:
            write_durably(self.partial / RECIPE_FILE, encode_json(self.provenance))
        for folder in (PARTS, STATES):
            (self.partial / folder).mkdir(exist_ok=True)

    def _leave_nothing(self) -> None:
        """Of a folder in which nothing was begun."""
        if [file.name for file in self.partial.iterdir()] == [LOCK_FILE]:
            (self.partial / LOCK_FILE).unlink()
            self.partial.rmdir()

    @property
    def done(self) -> set[str]:
        """The parts that are whole."""
        files = self.partial.glob("model-*.safetensors")
        return {file.stem.removeprefix("model-") for file in files} - {REST_PART}

    @property
    def states(self) -> Path:
        """A folder for what a run that is broken off needs to go on: gone in the end."""
        return self.partial / STATES

    def write(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None:
        """Store a part for good."""
        plain = {self.tensor_name(name): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        found, schemes = dict(plain), dict[str, StorageScheme]()
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                continue
            module = self.tensor_name(name).removesuffix(".weight")
            in_layer = name.startswith("layers.")
            scheme = choose_scheme(
                tensor,
                activations=self.recipe.activations and in_layer,
                as_int32=self.recipe.activations and not in_layer,  # so that no reader rounds its inputs, too
            )
            schemes[module] = scheme
            found |= {
                f"{module}.{inner}": inner_tensor
                for inner, inner_tensor in to_stored_tensors(tensor, scheme).items()
            }
        beside = {
            "names": sorted(tensors),
            "kept": unquantized_modules(plain),
            "schemes": {module: asdict(scheme) for module, scheme in sorted(schemes.items())},
        }
        with explain_disk_errors(self.folder, resumable=True):
            write_durably(self.partial / PARTS / f"{part}.json", encode_json(beside))
            self._save(part, found)

    def _save(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        save_tensors(self.partial / f"model-{part}.safetensors", tensors, {"format": "pt"}, self.folder)

    def finish(self) -> Path:
        """Copy what no part brought, say in config.json what is quantized, and give the folder its name."""
        with explain_disk_errors(self.folder, resumable=True):
            if not (self.partial / CONFIG_FILE).is_file():
                self._complete()
            for folder in (PARTS, STATES):
                shutil.rmtree(self.partial / folder, ignore_errors=True)
            fsync_path(self.partial)
            old = self.folder.with_name(self.folder.name + ".old")
            if self.folder.exists():
                check_target(self.folder, force=self.force)
                shutil.rmtree(old, ignore_errors=True)
                self.folder.rename(old)
            (self.partial / LOCK_FILE).unlink(missing_ok=True)
            self.partial.rename(self.folder)
            fsync_path(self.folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        self.close()
        return self.folder

    def _complete(self) -> None:
        beside = [read_json(file) for file in sorted((self.partial / PARTS).glob("*.json"))]
        names = {name for part in beside for name in part["names"]}
        schemes = {
            module: StorageScheme(**fields) for part in beside for module, fields in part["schemes"].items()
        }
        rest = self._rest(names)
        self._save(REST_PART, rest)
        kept = [*unquantized_modules(rest), *(module for part in beside for module in part["kept"])]
        placed = {
            name: file.name
            for file in sorted(self.partial.glob("model-*.safetensors"))
            for name in read_safetensors_header(file)
        }
        total = sum(file.stat().st_size for file in self.partial.glob("model-*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        write_durably(self.partial / INDEX_FILE, encode_json(index))
        copy_companion_files(self.header.path, self.partial, self.recipe)
        config = untie_head(self.header.config) if TIED_HEAD in names else dict(self.header.config)
        config["quantization_config"] = quantization_config(schemes, kept)
        write_durably(self.partial / CONFIG_FILE, encode_json(config))

    def _rest(self, names: set[str]) -> dict[str, Tensor]:
        """What the source stores and no part brought, by the names of its files: mapped, not read."""
        written = {entry.name for name, entry in self.header.tensors.items() if name in names}
        cut = sorted(
            name for name, entry in self.header.tensors.items() if entry.name in written and name not in names
        )
        assert not cut, f"of a stack of experts some were written, and not {cut[0]}"
        found: dict[str, Tensor] = {}
        for file in (self.header.path / name for name in weight_files(self.header.path)):
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name not in written}  # noqa: SIM118
        return found

    def tensor_name(self, name: str) -> str:
        """What the artefact calls a tensor: as the source's files do."""
        entry = self.header.tensors.get(name)
        if entry is None:
            embedding = self.header.tensors["embed_tokens.weight"].name
            assert name == TIED_HEAD, f"the source has no tensor {name}"
            return f"language_model.{name}" if embedding.startswith(MULTIMODAL_PREFIX) else name
        if entry.expert is None:
            return entry.name
        stacked = STACKED_EXPERT.fullmatch(entry.name)
        assert stacked, f"{entry.name} holds experts under a name that is not known"
        return f"{stacked['experts']}.{entry.expert}.{stacked['matrix']}.{stacked['kind'] or 'weight'}"

    def close(self) -> None:
        with suppress(OSError):
            self.lock.release()

    def __enter__(self) -> "Artefact":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unquantized_modules(tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules whose matrix is not quantized, and which a reader could take for one that is."""
    return sorted(
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and not name.endswith("embed_tokens.weight")
    )


def untie_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head is stored by itself, quantized; the embedding is not."""
    found: dict[str, Any] = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        found["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return found


def encode_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, ensure_ascii=False) + "\n").encode()
