"""Writes a quantized model as a Hugging Face folder that other programs can read, part by part and atomically.

    NAME.partial/model-PART.safetensors   finished parts, each renamed into place once it is on the disk
    NAME.partial/parts/PART.json          how the matrices of a part are stored
    NAME.partial/states/                  what the quantizer needs to resume
    NAME.partial/recipe.json              source and recipe, by which an interrupted run is resumed
    NAME.partial/config.json              written last: then the folder is complete, and is renamed to NAME

Tensors are passed with the names of `arch/layout.py`, as `Weights.take` returns them (norms as stored), and
written with the names of the source's files. Experts that the source stacks are stored separately. Tensors that no
part contains are copied. This module does not quantize.
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
from localllm.hub.model_files import INDEX_FILE, TEMPLATES_FOLDER, read_license, weight_files
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.check import artefact_bytes, quantized_layer_matrices
from localllm.quantize.compressed import StorageScheme, choose_scheme, quantization_config, to_stored_tensors
from localllm.quantize.source import (
    PARTIAL_SUFFIX,
    RECIPE_FILE,
    Recipe,
    check_source,
    hub_revision,
    source_identity,
)
from localllm.quantize.states import save_tensors
from localllm.quantize.store import DRAFT_SUFFIX, check_disk_space, fsync_path, write_durably

COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt")
LEGAL_FILES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
EXCLUDED_FILES = ("config.json", INDEX_FILE, "recipe.json", "quality.json")
MODEL_CARD = "README.md"
PARTS, STATES, CONFIG_FILE = "parts", "states", "config.json"
REST_PART = "rest"  # the part with copied tensors
STACKED_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<matrix>\w+_proj)(?:[._](?P<kind>weight|bias))?")
TIED_HEAD = "lm_head.weight"
# Prefix of the names of a text model in a multimodal one, which contains the head.
MULTIMODAL_PREFIX = "language_model.model."
LOCK_FILE = ".lock"


class Artefact:
    """An artefact that is being written, by this process alone; used in a `with` block, which releases its lock.

    calibration: digest of the calibration text, if the recipe uses one; force: replace an existing artefact, and
    one that was begun with another recipe.
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
        """Raises UsageError if the name is taken, another process is writing it, it was begun with another recipe,
        or the source is already quantized; DiskFull.
        """
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
                raise UsageError(
                    f"another process is writing {folder}", "wait until it has finished, or stop it"
                ) from None
            try:
                self._begin()
            except BaseException:
                self.close()
                self._leave_nothing()
                raise

    def _begin(self) -> None:
        provenance = read_json(self.partial / RECIPE_FILE)
        unknown_files = [
            file.name for file in self.partial.iterdir() if file.name != LOCK_FILE and file.suffix != DRAFT_SUFFIX
        ]
        if unknown_files and not provenance:
            raise UsageError(f"{self.partial} exists and was not written by localllm", "use another folder")
        if self.done and provenance != self.provenance and not self.force:
            raise UsageError(
                f"{self.partial} was started from another source or with another recipe",
                f"use --force to start over; to keep it, use a folder other than {self.folder}",
            )
        if provenance != self.provenance:
            clear_partial(self.partial)
        written = sum(file.stat().st_size for file in self.partial.glob("*.safetensors"))
        check_disk_space(self.partial, artefact_bytes(self.header, self.recipe) - written)
        if provenance != self.provenance:
            write_durably(self.partial / RECIPE_FILE, encode_json(self.provenance))
        for folder in (PARTS, STATES):
            (self.partial / folder).mkdir(exist_ok=True)

    def _leave_nothing(self) -> None:
        """Delete the partial folder if it contains only the lock."""
        if [file.name for file in self.partial.iterdir()] == [LOCK_FILE]:
            (self.partial / LOCK_FILE).unlink()
            self.partial.rmdir()

    @property
    def done(self) -> set[str]:
        """Names of the complete parts."""
        files = self.partial.glob("model-*.safetensors")
        return {file.stem.removeprefix("model-") for file in files} - {REST_PART}

    @property
    def states(self) -> Path:
        """Folder for what an interrupted run needs to resume; deleted at the end."""
        return self.partial / STATES

    def write(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None:
        """Store a part durably."""
        plain = {self.tensor_name(name): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        stored, schemes = dict(plain), dict[str, StorageScheme]()
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                continue
            module = self.tensor_name(name).removesuffix(".weight")
            scheme = choose_scheme(tensor, activations=self.recipe.activations and name.startswith("layers."))
            schemes[module] = scheme
            stored |= {
                f"{module}.{inner}": inner_tensor
                for inner, inner_tensor in to_stored_tensors(tensor, scheme).items()
            }
        description = {
            "names": sorted(tensors),
            "kept": unquantized_modules(plain),
            "schemes": {module: asdict(scheme) for module, scheme in sorted(schemes.items())},
        }
        with explain_disk_errors(self.folder, resumable=True):
            write_durably(self.partial / PARTS / f"{part}.json", encode_json(description))
            self._save(part, stored)

    def _save(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        save_tensors(self.partial / f"model-{part}.safetensors", tensors, {"format": "pt"}, self.folder)

    def finish(self) -> Path:
        """Copy tensors that no part contained, write config.json, and rename the folder."""
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
        descriptions = [read_json(file) for file in sorted((self.partial / PARTS).glob("*.json"))]
        names = {name for part in descriptions for name in part["names"]}
        schemes = {
            module: StorageScheme(**fields) for part in descriptions for module, fields in part["schemes"].items()
        }
        rest = self._rest(names)
        self._save(REST_PART, rest)
        unquantized = {*unquantized_modules(rest), *(module for part in descriptions for module in part["kept"])}
        if TIED_HEAD not in names:  # the head is the embedding, and is stored nowhere
            unquantized.add(self.tensor_name(TIED_HEAD).removesuffix(".weight"))
        weight_map = {
            name: file.name
            for file in sorted(self.partial.glob("model-*.safetensors"))
            for name in read_safetensors_header(file)
        }
        total = sum(file.stat().st_size for file in self.partial.glob("model-*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_durably(self.partial / INDEX_FILE, encode_json(index))
        copy_companion_files(self.header.path, self.partial, self.recipe)
        config = untie_head(self.header.config) if TIED_HEAD in names else dict(self.header.config)
        widest = max(tensor.shape[-1] for tensor in quantized_layer_matrices(self.header))
        config["quantization_config"] = quantization_config(schemes, sorted(unquantized), widest)
        write_durably(self.partial / CONFIG_FILE, encode_json(config))

    def _rest(self, names: set[str]) -> dict[str, Tensor]:
        """Return the tensors of the source that no part contained, by the names of its files: mapped, not read."""
        written = {entry.name for name, entry in self.header.tensors.items() if name in names}
        missing = sorted(
            name for name, entry in self.header.tensors.items() if entry.name in written and name not in names
        )
        assert not missing, f"a stack of experts was written without {missing[0]}"
        tensors: dict[str, Tensor] = {}
        for file in (self.header.path / name for name in weight_files(self.header.path)):
            with safe_open(file, framework="pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in stored.keys() if name not in written}  # noqa: SIM118
        return tensors

    def tensor_name(self, name: str) -> str:
        """Return the name of a tensor in the artefact, as in the source's files."""
        entry = self.header.tensors.get(name)
        if entry is None:
            embedding = self.header.tensors["embed_tokens.weight"].name
            assert name == TIED_HEAD, f"the source has no tensor {name}"
            return f"language_model.{name}" if embedding.startswith(MULTIMODAL_PREFIX) else name
        if entry.expert is None:
            return entry.name
        stacked = STACKED_EXPERT.fullmatch(entry.name)
        assert stacked, f"{entry.name} contains experts under an unknown name"
        return f"{stacked['experts']}.{entry.expert}.{stacked['matrix']}.{stacked['kind'] or 'weight'}"

    def close(self) -> None:
        with suppress(OSError):
            self.lock.release()

    def __enter__(self) -> "Artefact":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unquantized_modules(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the modules with an unquantized matrix that a reader could take for quantized."""
    return sorted(
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and not name.endswith("embed_tokens.weight")
    )


def untie_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model whose head is stored separately, quantized, unlike the embedding."""
    untied: dict[str, Any] = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        untied["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return untied


def encode_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, ensure_ascii=False) + "\n").encode()


def check_target(folder: Path, *, force: bool) -> None:
    """Raise UsageError if an artefact must not replace what exists at this path, or if it has no name of its
    own.
    """
    if folder.name in ("", ".."):
        raise UsageError(f"{folder} cannot be the name of a new folder", "name one, as in -o DIR")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / RECIPE_FILE).is_file():
        raise UsageError(f"{folder} exists and was not written by localllm", "use another folder")
    if not force:
        raise UsageError(f"{folder} already exists", "use another folder, or add --force to replace it")


def clear_partial(partial: Path) -> None:
    """Empty a partial folder, except for its lock and recipe.

    Shards are deleted before the files that describe them: whenever this is interrupted, the remaining ones are
    complete.
    """
    for file in sorted(partial.iterdir(), key=Path.is_dir):
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in (LOCK_FILE, RECIPE_FILE):
            file.unlink()


def copy_companion_files(source: Path, target: Path, recipe: Recipe) -> None:
    """Copy the files of a model folder besides weights and config.json: tokenizer, templates, licence. Python
    files are not copied.
    """
    folders = (source, source / TEMPLATES_FOLDER)
    for file in sorted(file for folder in folders if folder.is_dir() for file in folder.iterdir()):
        if file.is_file() and is_companion_file(file.name):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            write_durably(copy, file.read_bytes())
    if license := read_license(source):
        write_durably(target / MODEL_CARD, write_model_card(source, license, recipe).encode())


def is_companion_file(name: str) -> bool:
    return name.upper().startswith(LEGAL_FILES) or (
        name.endswith(COMPANION_SUFFIXES) and name not in EXCLUDED_FILES
    )


def write_model_card(source: Path, license: str, recipe: Recipe) -> str:
    """Return a model card: the front matter that hubs and `localllm show` read, and a sentence."""
    revision = hub_revision(source)
    name = f"{revision[0]} at {revision[1]}" if revision else source.resolve().name
    base_fields = f"base_model: {revision[0]}\nbase_model_relation: quantized\n" if revision else ""
    return (
        f"---\nlicense: {license}\n{base_fields}---\n\n{name}, quantized by localllm: {describe_recipe(recipe)}.\n"
    )


def describe_recipe(recipe: Recipe) -> str:
    """Describe a recipe, as in `rtn, INT4 in groups of 128, symmetric, head INT8`."""
    group = f"in groups of {recipe.group}" if recipe.group else "with a scale a row"
    zero_points = "symmetric" if recipe.symmetric else "with zero points"
    head = f"head INT{recipe.head_bits}" if recipe.head_bits < 16 else "head as it was"
    activations = ["activations INT8"] if recipe.activations else []
    return ", ".join([recipe.method, f"INT{recipe.bits} {group}", zero_points, *activations, head])
