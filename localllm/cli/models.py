"""`localllm list` and `localllm show`: the models on this machine and in the catalog, and the details of one."""

import dataclasses
import json
import shlex
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from localllm.checkpoint.facts import ModelSummary, summarize_model
from localllm.checkpoint.kept_layouts import KeptFile, kept_files
from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.cli.quality_page import format_quality
from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.formatting import format_bytes, format_columns, format_count, format_rough_bytes, format_table
from localllm.hub.catalog import CatalogEntry, bundled_folder, catalog, catalog_entries
from localllm.hub.hf_cache import cached_models
from localllm.hub.local_names import edition_files, find_edition, read_aliases
from localllm.hub.model_files import missing_files
from localllm.hub.names import RepoName, is_path, parse_name, repo_of_entry, strip_latest
from localllm.hub.resolve import edition_in_cache, model_in_cache, resolve_model
from localllm.modelfile.edition import to_json
from localllm.modelfile.options import to_sampling_params
from localllm.modelfile.parse import format_modelfile
from localllm.quality.report import Quality, as_dict, read_report
from localllm.quantize.store import StoredArtefact, artefact_path, find_artefacts, list_artefacts
from localllm.request import SamplingParams
from localllm.settings import Settings


class State(StrEnum):
    """Origin of a local model, or why it cannot run."""

    QUANTIZED = "quantized"  # by --quant, cached in the home folder
    BUNDLED = "boxed"  # comes with localllm
    DOWNLOADED = "downloaded"  # in the Hugging Face cache
    FOLDER = "folder"  # given as a path
    FILE = "file"  # GGUF file given as a path
    DAMAGED = "damaged"  # a file violates its format
    UNSUPPORTED = "unsupported"  # pickled weights, or an unsupported format
    INCOMPLETE = "incomplete"  # interrupted download or quantization
    ABSENT = "not here"  # not downloaded


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """One model as both commands show it; None if a value is unknown."""

    name: str
    state: State
    repo: str | None
    path: Path | None
    license: str | None
    stated_parameters: str | None  # from the model card
    context: int | None
    download_bytes: int | None = None  # approximate
    facts: ModelSummary | None = None
    fault: DamagedModel | UnsupportedModel | None = None

    @property
    def parameters(self) -> str:
        """Number of parameters, counted for a local model; for a mixture of experts with the active ones."""
        if not self.facts:
            return self.stated_parameters or "-"
        active = self.facts.active_parameters
        suffix = f", {format_count(active)} active" if active < self.facts.parameters else ""
        return format_count(self.facts.parameters) + suffix

    @property
    def is_here(self) -> bool:
        return self.state not in (State.INCOMPLETE, State.ABSENT)


def list_models(
    everything: Annotated[
        bool, options.switch("--all", text="Include catalog models that are not downloaded.")
    ] = False,
    as_json: options.JsonList = False,
) -> None:
    """List the models on this machine, or the whole catalog."""
    out = StdoutWriter()
    entries = sorted(list_entries(), key=lambda entry: not entry.is_here)
    assigned = {*read_aliases(), *edition_files()}
    models = [e for e in entries if everything or e.state is not State.ABSENT or e.name in assigned]
    if as_json:
        out.write(json.dumps([_entry_json(entry) for entry in models], indent=1) + "\n")
        return
    header = ("NAME", "PARAMETERS", "CONTEXT", "SIZE", "LICENSE", "STATE")
    out.write(format_table([header, *(_table_row(entry) for entry in models)]) + "\n")
    if out.terminal and len(models) < len(entries):
        note(f"{len(entries) - len(models)} more can be downloaded: `localllm list --all`")


def show(model: options.ModelName, quant: options.ArtefactQuant = None, as_json: options.Json = False) -> None:
    """Show the details of a model.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Reads no weights
    and downloads nothing.
    """
    out = StdoutWriter()
    entry = (
        _find_entry(strip_latest(model))
        if quant is None
        else _entry_from_artefact(_current_artefact(model, quant))
    )
    if entry.fault:
        raise entry.fault
    edition = find_edition(entry.name)
    if edition and entry.facts:
        sampling = to_sampling_params(edition.parameters, entry.facts.sampling)
        entry = dataclasses.replace(entry, facts=dataclasses.replace(entry.facts, sampling=sampling))
    layouts = _kept_layouts(entry)
    if as_json:
        content = _entry_json(entry) | {
            "edition": to_json(edition) if edition else None,
            "layouts": [{"path": str(file.path), "bytes": file.nbytes} for file in layouts],
        }
        out.write(json.dumps(content, indent=1) + "\n")
        return
    kept = [f"{format_bytes(file.nbytes)} in {file.path}" for file in layouts]
    out.write(format_columns([*_details(entry), *_labelled_lines("kept layout", kept)]) + "\n")
    if edition:
        out.write("\n" + format_modelfile(edition, edition.parent or edition.source))
    if quality := _read_quality(entry):
        out.write("\n" + format_quality(quality) + "\n")


def _kept_layouts(entry: ModelEntry) -> list[KeptFile]:
    return kept_files(Settings.from_environment().cache, entry.path) if entry.facts and entry.path else []


def _home_folder() -> Path:
    return Settings.from_environment().home


def artefact_source(model: str) -> str:
    """Source that artefacts of a model record: its repository, or the path of its folder. Raises ModelNotFound."""
    match parse_name(model):
        case RepoName() as repo:
            return edition_in_cache(repo).repo
        case CatalogEntry() as entry:
            return str(bundled_folder(entry))
        case Path() as path:
            return str(path.resolve())


def _current_artefact(model: str, quant: str) -> StoredArtefact:
    """Cached quantization of the current weights, or the newest one if the source is gone or has changed. Raises
    as `find_artefacts`."""
    artefacts = find_artefacts(_home_folder(), artefact_source(model), quant)
    try:
        current = artefact_path(_home_folder(), resolve_model(model).path, quant)
    except LocalLLMError:  # the source is gone
        return artefacts[-1]
    return next((artefact for artefact in artefacts if artefact.path == current), artefacts[-1])


def list_entries() -> Iterator[ModelEntry]:
    """All models of the catalog, and all other models on this machine. Reads headers."""
    catalog_models = [_entry_from_catalog(entry) for entry in catalog_entries()]
    yield from catalog_models
    listed_paths = {entry.path for entry in catalog_models}
    for name, path in cached_models():
        if path not in listed_paths:
            yield _entry_from_header(name, State.DOWNLOADED, path, name.partition(":")[0])
    yield from map(_entry_from_alias, dict.fromkeys([*read_aliases(), *edition_files()]))
    yield from map(_entry_from_artefact, list_artefacts(_home_folder()))


def _find_entry(model: str) -> ModelEntry:
    if model in catalog() and not is_path(model):
        return _entry_from_catalog(catalog()[model])
    if model in read_aliases() or model in edition_files():
        return _entry_from_alias(model)
    ref = resolve_model(model)
    if isinstance(repo := parse_name(model), RepoName):
        return _entry_from_header(str(repo), State.DOWNLOADED, ref.path, repo.repo)
    return _entry_from_header(ref.name, State.FILE if ref.path.is_file() else State.FOLDER, ref.path)


def _entry_from_catalog(entry: CatalogEntry) -> ModelEntry:
    if (named := repo_of_entry(entry)) is None:
        path, state, source = bundled_folder(entry), State.BUNDLED, None
    else:
        repo = edition_in_cache(named)
        path, state, source = model_in_cache(repo), State.DOWNLOADED, repo.repo
    if path is None or not path.exists():
        return _entry_without_header(entry.name, State.ABSENT, source, None, entry)
    return _entry_from_header(entry.name, state, path, source, entry)


def _entry_from_artefact(artefact: StoredArtefact) -> ModelEntry:
    """Entry of a cached quantization, named by the arguments that run it."""
    name = f"{shlex.quote(artefact.source)} --quant {artefact.quant}"
    if not artefact.complete:
        return _entry_without_header(name, State.INCOMPLETE, None, artefact.path, None)
    return _entry_from_header(name, State.QUANTIZED, artefact.path)


def _entry_without_header(
    name: str, state: State, repo: str | None, path: Path | None, known: CatalogEntry | None
) -> ModelEntry:
    """Entry of a model without reading its files."""
    if known is None:
        return ModelEntry(name, state, repo, path, None, None, None)
    stated = known.license, known.parameters, known.context, known.bytes
    return ModelEntry(name, state, repo, path, *stated)


def _entry_from_alias(name: str) -> ModelEntry:
    """Entry of a name that the user assigned, with what is known about its model."""
    match parse_name(name):
        case CatalogEntry() as entry:
            return dataclasses.replace(_entry_from_catalog(entry), name=name)
        case RepoName() as repo:
            try:
                path, state, source = model_in_cache(repo), State.DOWNLOADED, repo.repo
            except ModelNotFound:  # several models match, and none is the default
                path, state, source = None, State.ABSENT, repo.repo
        case Path() as path:
            state, source = State.FILE if path.is_file() else State.FOLDER, None
    if path is None or not path.exists():
        return _entry_without_header(name, State.ABSENT, source, None, None)
    return _entry_from_header(name, state, path, source)


def _entry_from_header(
    name: str, state: State, folder: Path, repo: str | None = None, known: CatalogEntry | None = None
) -> ModelEntry:
    try:
        if missing_files(folder):
            return _entry_without_header(name, State.INCOMPLETE, repo, folder, known)
        facts = summarize_model(folder)
    except (DamagedModel, UnsupportedModel) as fault:
        state = State.DAMAGED if isinstance(fault, DamagedModel) else State.UNSUPPORTED
        return dataclasses.replace(
            _entry_without_header(name, state, repo, folder, known), context=None, fault=fault
        )
    entry = _entry_without_header(name, State.UNSUPPORTED if facts.refused else state, repo, folder, known)
    return dataclasses.replace(entry, license=entry.license or facts.license, context=facts.context, facts=facts)


def _table_row(entry: ModelEntry) -> tuple[str, ...]:
    download = format_rough_bytes(entry.download_bytes) if entry.download_bytes else "-"
    size = format_bytes(entry.facts.weight_bytes) if entry.facts else download
    context = str(entry.context) if entry.context else "-"
    return (entry.name, entry.parameters, context, size, entry.license or "-", entry.state)


def _details(entry: ModelEntry) -> list[tuple[str, str]]:
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
        sampling = _recommended_sampling(facts)
        rows += [
            ("architecture", facts.architecture),
            ("hidden size", str(facts.hidden_size)),
            ("vocabulary", f"{facts.vocab_size} tokens"),
            *_labelled_lines("layers", [f"{count} x {kind}" for kind, count in facts.layers]),
            *([("embeddings", f"{facts.dimensions} dimensions")] if facts.dimensions else []),
            ("KV cache", _cache_sizes(facts)),
            *([("state", f"{format_bytes(facts.state_bytes)} per sequence")] if facts.state_bytes else []),
            ("weights", format_bytes(facts.weight_bytes)),
            *_labelled_lines(
                "formats",
                [f"{f.name}: {f.tensors} tensors, {format_bytes(f.nbytes)}" for f in facts.formats],
            ),
            ("quantization", facts.quantization or "none"),
            *([("unsupported", str(facts.refused))] if facts.refused else []),
            ("chat template", ", ".join(facts.chat_templates) or f"none: it {use_without_chat(facts)}"),
            ("sampling", " ".join(f"{name}={value}" for name, value in sampling.items()) or "-"),
        ]
    elif entry.repo:
        size = [("download", format_rough_bytes(entry.download_bytes))] if entry.download_bytes else []
        rows += [*size, ("get it with", f"localllm pull {entry.name}")]
    return rows


def use_without_chat(facts: ModelSummary) -> str:
    return "computes embeddings" if facts.dimensions else "continues text"


def _cache_sizes(facts: ModelSummary) -> str:
    size = f"{format_bytes(facts.kv_bytes_per_token)} per token in 16 bits"
    in_4_bits = facts.kv_bytes_per_token_in_4_bits
    return f"{size}, {format_bytes(in_4_bits)} with --kv-dtype int4" if in_4_bits else size


def _labelled_lines(name: str, lines: list[str]) -> list[tuple[str, str]]:
    """Rows with the label only before the first line."""
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def _entry_json(entry: ModelEntry) -> dict[str, object]:
    """Object that `--json` prints; docs/cli.md describes its fields. None if a value is unknown."""
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
        "kv_bytes_per_token_in_4_bits": facts.kv_bytes_per_token_in_4_bits if facts else None,
        "state_bytes": facts.state_bytes if facts else None,
        "dimensions": facts.dimensions if facts else None,
        "formats": [dataclasses.asdict(fmt) for fmt in facts.formats] if facts else None,
        "weight_bytes": facts.weight_bytes if facts else None,
        "quantization": facts.quantization if facts else None,
        "chat_templates": facts.chat_templates if facts else None,
        "sampling": _recommended_sampling(facts) if facts else None,
        "quality": as_dict(quality) if (quality := _read_quality(entry)) else None,
    }


def _read_quality(entry: ModelEntry) -> Quality | None:
    """Quality report of a quantized model, or None. A report that cannot be read is noted and counts as
    missing."""
    try:
        return read_report(entry.path) if entry.path else None
    except (DamagedModel, UnsupportedModel) as fault:
        note(f"note: {fault}")
        return None


def _recommended_sampling(facts: ModelSummary) -> dict[str, object]:
    """Sampling parameters that the model recommends, if they differ from the neutral ones."""
    neutral = dataclasses.asdict(SamplingParams())
    return {name: value for name, value in dataclasses.asdict(facts.sampling).items() if value != neutral[name]}
