"""`localllm list` and `localllm show`: which models there are, and what one says about itself."""

import dataclasses
import json
import shlex
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from localllm import units
from localllm.checkpoint.facts import Facts, read_facts
from localllm.cli import options
from localllm.cli.io import AnswerWriter, note
from localllm.cli.quality_page import text_of
from localllm.columns import columns, table
from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.hub.aliases import aliases
from localllm.hub.catalog import CatalogEntry, boxed_folder, catalog, entries
from localllm.hub.folder import missing_files
from localllm.hub.made import edition_of, made_files
from localllm.hub.names import RepoName, is_path, known_as, parse, repo_of
from localllm.hub.resolve import model_in_cache, resolve
from localllm.hub.store import cached_models
from localllm.modelfile.edition import to_json
from localllm.modelfile.options import sampling
from localllm.modelfile.parse import written
from localllm.quality.report import Quality, as_dict, read
from localllm.quantize.store import Kept, kept, kept_of, place
from localllm.request import SamplingParams
from localllm.settings import Settings


class State(StrEnum):
    """Where a model is."""

    QUANTIZED = "quantized"  # by --quant, kept under the home folder
    BOXED = "boxed"  # comes with the program
    DOWNLOADED = "downloaded"  # in the Hugging Face cache
    FOLDER = "folder"  # given as a path
    FILE = "file"  # of GGUF, given as a path
    DAMAGED = "damaged"  # a file contradicts its format
    UNSUPPORTED = "unsupported"  # pickled weights, or a format that does not run
    INCOMPLETE = "incomplete"  # a download or a quantization that was broken off
    ABSENT = "not here"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model as both commands show it; None where it does not say."""

    name: str
    state: State
    repo: str | None
    path: Path | None
    license: str | None
    stated_parameters: str | None  # by the model card
    context: int | None
    download_bytes: int | None = None  # about
    facts: Facts | None = None
    fault: DamagedModel | UnsupportedModel | None = None

    @property
    def parameters(self) -> str:
        """Counted where the model is here; of a mixture also how many a token meets."""
        if not self.facts:
            return self.stated_parameters or "-"
        active = self.facts.active_parameters
        one_token = f", {units.count(active)} active" if active < self.facts.parameters else ""
        return units.count(self.facts.parameters) + one_token

    @property
    def is_here(self) -> bool:
        return self.state not in (State.INCOMPLETE, State.ABSENT)


def list_models(
    everything: Annotated[
        bool, options.switch("--all", text="Also models that are known by name and not here.")
    ] = False,
    as_json: options.JsonList = False,
) -> None:
    """List the models on this machine, or all that are known by name."""
    out = AnswerWriter()
    found = sorted(known_models(), key=lambda entry: not entry.is_here)
    own = {*aliases(), *made_files()}
    models = [entry for entry in found if everything or entry.state is not State.ABSENT or entry.name in own]
    if as_json:
        out.write(json.dumps([_as_json(entry) for entry in models], indent=1) + "\n")
        return
    header = ("NAME", "PARAMETERS", "CONTEXT", "SIZE", "LICENSE", "STATE")
    out.write(table([header, *(_row(entry) for entry in models)]) + "\n")
    if out.terminal and len(models) < len(found):
        note(f"{len(found) - len(models)} more are known by name: `localllm list --all`")


def show(model: options.ModelName, quant: options.OfQuant = None, as_json: options.Json = False) -> None:
    """Show what is known of a model.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Reads no weights
    and downloads nothing.
    """
    out = AnswerWriter()
    entry = _find(known_as(model)) if quant is None else _from_kept(_kept_as_it_is(model, quant))
    if entry.fault:
        raise entry.fault
    edition = edition_of(entry.name)
    if edition and entry.facts:
        drawn = sampling(edition.parameters, entry.facts.sampling)
        entry = dataclasses.replace(entry, facts=dataclasses.replace(entry.facts, sampling=drawn))
    if as_json:
        told = _as_json(entry) | {"edition": to_json(edition) if edition else None}
        out.write(json.dumps(told, indent=1) + "\n")
        return
    out.write(columns(_details(entry)) + "\n")
    if edition:
        out.write("\n" + written(edition, edition.parent or edition.source))
    if quality := _quality(entry):
        out.write("\n" + text_of(quality) + "\n")


def _home() -> Path:
    return Settings.from_environment().home


def source_of(model: str) -> str:
    """What an artefact says it was made of: a repository, or the path of a folder. Raises ModelNotFound."""
    match parse(model):
        case RepoName() as repo:
            return repo.repo
        case CatalogEntry() as entry:
            return str(boxed_folder(entry))
        case Path() as path:
            return str(path.resolve())


def _kept_as_it_is(model: str, quant: str) -> Kept:
    """That of the weights as they are now, where there are others of what the source held before. Raises as
    `kept_of`."""
    found = kept_of(_home(), source_of(model), quant)
    try:
        current = place(_home(), resolve(model).path, quant)
    except LocalLLMError:  # the source is gone
        return found[-1]
    return next((one for one in found if one.path == current), found[-1])


def known_models() -> Iterator[Entry]:
    """Those of the catalogue, here or not, and what else is here. Reads headers."""
    known = [_from_catalog(entry) for entry in entries()]
    yield from known
    shown = {entry.path for entry in known}
    for name, path in cached_models():
        if path not in shown:
            yield _here(name, State.DOWNLOADED, path, name.partition(":")[0])
    yield from map(_from_alias, dict.fromkeys([*aliases(), *made_files()]))
    yield from map(_from_kept, kept(_home()))


def _find(model: str) -> Entry:
    if model in catalog() and not is_path(model):
        return _from_catalog(catalog()[model])
    if model in aliases() or model in made_files():
        return _from_alias(model)
    ref = resolve(model)
    if isinstance(repo := parse(model), RepoName):
        return _here(str(repo), State.DOWNLOADED, ref.path, repo.repo)
    return _here(ref.name, State.FILE if ref.path.is_file() else State.FOLDER, ref.path)


def _from_catalog(entry: CatalogEntry) -> Entry:
    repo = repo_of(entry)
    path = model_in_cache(repo) if repo else boxed_folder(entry)
    if path is None or not path.exists():
        return _stated(entry.name, State.ABSENT, entry.repo, None, entry)
    return _here(entry.name, State.DOWNLOADED if repo else State.BOXED, path, entry.repo, entry)


def _from_kept(one: Kept) -> Entry:
    """What `--quant` has made of a model, by the words that run it."""
    name = f"{shlex.quote(one.source)} --quant {one.quant}"
    return (
        _here(name, State.QUANTIZED, one.path)
        if one.whole
        else _stated(name, State.INCOMPLETE, None, one.path, None)
    )


def _stated(name: str, state: State, repo: str | None, path: Path | None, known: CatalogEntry | None) -> Entry:
    """What is known of a model without a look into it."""
    if known is None:
        return Entry(name, state, repo, path, None, None, None)
    stated = known.license, known.parameters, known.context, known.bytes
    return Entry(name, state, repo, path, *stated)


def _from_alias(name: str) -> Entry:
    """A name that the person gave, with what is known of the model."""
    match parse(name):
        case CatalogEntry() as entry:
            return dataclasses.replace(_from_catalog(entry), name=name)
        case RepoName() as repo:
            try:
                path, state, source = model_in_cache(repo), State.DOWNLOADED, repo.repo
            except ModelNotFound:  # there are several, none of which is meant before the others
                path, state, source = None, State.ABSENT, repo.repo
        case Path() as path:
            state, source = State.FILE if path.is_file() else State.FOLDER, None
    if path is None or not path.exists():
        return _stated(name, State.ABSENT, source, None, None)
    return _here(name, state, path, source)


def _here(
    name: str, state: State, folder: Path, repo: str | None = None, known: CatalogEntry | None = None
) -> Entry:
    try:
        if missing_files(folder):
            return _stated(name, State.INCOMPLETE, repo, folder, known)
        facts = read_facts(folder)
    except (DamagedModel, UnsupportedModel) as fault:
        state = State.DAMAGED if isinstance(fault, DamagedModel) else State.UNSUPPORTED
        return dataclasses.replace(_stated(name, state, repo, folder, known), context=None, fault=fault)
    found = _stated(name, State.UNSUPPORTED if facts.refused else state, repo, folder, known)
    return dataclasses.replace(found, license=found.license or facts.license, context=facts.context, facts=facts)


def _row(entry: Entry) -> tuple[str, ...]:
    stated = units.rough_size(entry.download_bytes) if entry.download_bytes else "-"
    size = units.size(entry.facts.weight_bytes) if entry.facts else stated
    context = str(entry.context) if entry.context else "-"
    return (entry.name, entry.parameters, context, size, entry.license or "-", entry.state)


def _details(entry: Entry) -> list[tuple[str, str]]:
    rows = [
        ("name", entry.name),
        ("state", entry.state),
        ("path", str(entry.path or "-")),
        ("repository", entry.repo or "-"),
        ("license", entry.license or "-"),
        ("parameters", entry.parameters),
        ("context", f"{entry.context} tokens" if entry.context else "-"),
    ]
    if facts := entry.facts:
        drawn = _sampling(facts)
        rows += [
            ("architecture", facts.architecture),
            ("hidden size", str(facts.hidden_size)),
            ("vocabulary", f"{facts.vocab_size} tokens"),
            *_listed("layers", [f"{count} x {kind}" for kind, count in facts.layers]),
            *([("vectors", f"of {facts.dimensions} numbers")] if facts.dimensions else []),
            ("KV cache", f"{units.size(facts.kv_bytes_per_token)} a token in 16 bits"),
            *([("state", f"{units.size(facts.state_bytes)} a sequence")] if facts.state_bytes else []),
            ("weights", units.size(facts.weight_bytes)),
            *_listed("formats", [f"{f.name}: {f.tensors} tensors, {units.size(f.nbytes)}" for f in facts.formats]),
            ("quantization", facts.quantization or "none"),
            *([("does not run", str(facts.refused))] if facts.refused else []),
            ("chat template", ", ".join(facts.chat_templates) or f"none: it {without_chat(facts)}"),
            ("sampling", " ".join(f"{name}={value}" for name, value in drawn.items()) or "-"),
        ]
    elif entry.repo:
        size = [("download", units.rough_size(entry.download_bytes))] if entry.download_bytes else []
        rows += [*size, ("to get it", f"localllm pull {entry.name}")]
    return rows


def without_chat(facts: Facts) -> str:
    return "gives vectors" if facts.dimensions else "continues text"


def _listed(name: str, lines: list[str]) -> list[tuple[str, str]]:
    """The name before the first of the lines alone."""
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def _as_json(entry: Entry) -> dict[str, object]:
    """The object that docs/cli.md describes; null where nothing is known."""
    facts = entry.facts
    return {
        "name": entry.name,
        "state": entry.state,
        "path": str(entry.path) if entry.path else None,
        "repo": entry.repo,
        "license": entry.license,
        "stated_parameters": entry.stated_parameters,
        "context": entry.context,
        "download_bytes": entry.download_bytes,
        "architecture": facts.architecture if facts else None,
        "layers": [{"kind": kind, "count": count} for kind, count in facts.layers] if facts else None,
        "hidden_size": facts.hidden_size if facts else None,
        "vocab_size": facts.vocab_size if facts else None,
        "parameters": facts.parameters if facts else None,
        "active_parameters": facts.active_parameters if facts else None,
        "kv_bytes_per_token": facts.kv_bytes_per_token if facts else None,
        "state_bytes": facts.state_bytes if facts else None,
        "dimensions": facts.dimensions if facts else None,
        "formats": [dataclasses.asdict(form) for form in facts.formats] if facts else None,
        "weight_bytes": facts.weight_bytes if facts else None,
        "quantization": facts.quantization if facts else None,
        "chat_templates": facts.chat_templates if facts else None,
        "sampling": _sampling(facts) if facts else None,
        "quality": as_dict(quality) if (quality := _quality(entry)) else None,
    }


def _quality(entry: Entry) -> Quality | None:
    """How far it is from what it was made of, where that was measured; a report that cannot be read hides nothing
    else."""
    try:
        return read(entry.path) if entry.path else None
    except (DamagedModel, UnsupportedModel) as fault:
        note(f"note: {fault}")
        return None


def _sampling(facts: Facts) -> dict[str, object]:
    """What the model recommends that is not the neutral value anyway."""
    neutral = dataclasses.asdict(SamplingParams())
    return {name: value for name, value in dataclasses.asdict(facts.sampling).items() if value != neutral[name]}
