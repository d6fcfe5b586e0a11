"""`localllm rm`, `cp` and `create`: remove models from this machine, and give them names."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from localllm.checkpoint.kept_layouts import kept_files, kept_files_of
from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.errors import ModelNotFound, UsageError
from localllm.files import expand_path
from localllm.formatting import format_bytes
from localllm.hub.assign_name import assigned_target, copy_name, remove_name
from localllm.hub.local_names import edition_files, find_edition, read_aliases
from localllm.hub.names import is_path, strip_latest
from localllm.hub.remove import Removal, plan_removal, removable_repo
from localllm.hub.resolve import resolve_model
from localllm.modelfile.edition import TEXT_LIMIT, CreateRequest, to_json
from localllm.modelfile.parse import parse_modelfile
from localllm.quantize.store import find_artefacts
from localllm.settings import Settings


def rm(
    model: Annotated[list[str], typer.Argument(metavar="MODEL", hidden=True)],
    quant: options.ArtefactQuant = None,
    layout: Annotated[
        bool, options.switch("--layout", text="Remove only the weights that --keep-layout has kept.")
    ] = False,
    dry_run: Annotated[
        bool, options.switch("--dry-run", text="Print what would be removed without removing it.")
    ] = False,
    as_json: options.JsonList = False,
) -> None:
    """Remove models from this machine.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a GGUF
    repository. Files shared with other revisions remain. For a name created by `localllm cp`, only the name is
    removed. With --quant, only the cached quantization is removed, not the model; with --layout, only its weights
    in the layout of CPU kernels, for which MODEL may also be a path.
    """
    if quant and layout:
        raise UsageError("--quant and --layout remove different files", "leave one of them out")
    if layout:
        _remove_layouts(model, dry_run, as_json)
        return
    if quant:
        _remove_artefacts(model, quant, dry_run, as_json)
        return
    out, assigned_names = StdoutWriter(), {*read_aliases(), *edition_files()}
    names = [strip_latest(name) for name in model]
    # Every name is checked before anything is removed.
    repos = [None if name in assigned_names else removable_repo(name) for name in names]
    for repo in repos:
        if repo:
            plan_removal(repo)
    verb = "would remove" if dry_run else "removed"
    results: list[dict[str, object]] = []
    for name, repo in zip(names, repos, strict=True):
        if repo is None:
            target = assigned_target(name) if dry_run else remove_name(name)
            results.append({"name": name, "alias_of": target, "freed_bytes": 0, "dry_run": dry_run})
            text = f"the name {name} of {target}; the model stays"
        else:
            plan = plan_removal(repo)
            paths = (file.path for file in plan.files)
            layouts = kept_files_of(plan.repo, paths, Settings.from_environment().cache)
            layout_bytes = sum(file.nbytes if dry_run else file.remove() for file in layouts)
            freed_bytes = layout_bytes + (plan.freed_bytes if dry_run else plan.execute())
            results.append(_removal_json(name, plan, freed_bytes, layout_bytes, dry_run))
            text = _describe_removal(plan, freed_bytes, layout_bytes)
        if not as_json:
            out.write(f"{verb} {text}\n")
    if as_json:
        out.write(json.dumps(results, indent=1) + "\n")


def _remove_artefacts(models: list[str], quant: str, dry_run: bool, as_json: bool) -> None:
    from localllm.cli.models import artefact_source

    out, home = StdoutWriter(), Settings.from_environment().home
    # Every name is checked before anything is removed.
    artefacts = [(name, find_artefacts(home, artefact_source(name), quant)) for name in models]
    verb = "would remove" if dry_run else "removed"
    results: list[dict[str, object]] = []
    for name, stored in artefacts:
        cache = Settings.from_environment().cache
        layouts = [file for artefact in stored if artefact.complete for file in kept_files(cache, artefact.path)]
        freed_bytes = sum(file.nbytes if dry_run else file.remove() for file in (*layouts, *stored))
        paths = [str(artefact.path) for artefact in stored]
        results.append(
            {"name": name, "quant": quant, "paths": paths, "freed_bytes": freed_bytes, "dry_run": dry_run}
        )
        if not as_json:
            out.write(f"{verb} {name} --quant {quant}, frees {format_bytes(freed_bytes)}\n")
    if as_json:
        out.write(json.dumps(results, indent=1) + "\n")


def _remove_layouts(models: list[str], dry_run: bool, as_json: bool) -> None:
    out, cache = StdoutWriter(), Settings.from_environment().cache
    # Every name is checked before anything is removed.
    layouts = [(name, kept_files(cache, resolve_model(name).path)) for name in models]
    for name, files in layouts:
        if not files:
            raise ModelNotFound(f"no layout of {name} is kept", "`localllm show` shows those that are")
    results: list[dict[str, object]] = []
    for name, files in layouts:
        freed_bytes = sum(file.nbytes if dry_run else file.remove() for file in files)
        paths = [str(file.path) for file in files]
        results.append({"name": name, "paths": paths, "freed_bytes": freed_bytes, "dry_run": dry_run})
        if not as_json:
            verb = "would remove" if dry_run else "removed"
            out.write(f"{verb} the kept layout of {name}, frees {format_bytes(freed_bytes)}\n")
    if as_json:
        out.write(json.dumps(results, indent=1) + "\n")


def _describe_removal(plan: Removal, freed_bytes: int, layout_bytes: int) -> str:
    partial = f" and {_count_files(len(plan.unfinished))} of interrupted downloads" if plan.unfinished else ""
    reasons: defaultdict[str, int] = defaultdict(int)
    for file in plan.kept:
        reasons[file.why] += file.size
    layout = " and its kept layout" if layout_bytes else ""
    first = f"{plan.repo}: {_count_files(len(plan.files))}{partial}{layout}, frees {format_bytes(freed_bytes)}"
    return "\n".join([first, *(f"kept {format_bytes(nbytes)}: {why}" for why, nbytes in reasons.items())])


def _count_files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _removal_json(
    name: str, plan: Removal, freed_bytes: int, layout_bytes: int, dry_run: bool
) -> dict[str, object]:
    return {
        "name": name,
        "repo": plan.repo.repo,
        "revision": plan.repo.revision,
        "files": [file.path for file in plan.files],
        "unfinished": len(plan.unfinished),
        "freed_bytes": freed_bytes,
        "layout_bytes": layout_bytes,
        "kept": [{"path": file.path, "bytes": file.size, "why": file.why} for file in plan.kept],
        "dry_run": dry_run,
    }


def cp(
    model: options.ModelName,
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    as_json: options.Json = False,
) -> None:
    """Create an alias of a model.

    NAME becomes an alias of MODEL: a name of `localllm list --all`, ORG/REPO with optional @REVISION or :QUANT, or
    a path. No files are copied. `localllm rm NAME` removes the alias.
    """
    out = StdoutWriter()
    source = copy_name(name, model)
    out.write(json.dumps({"name": name, "source": source}) + "\n" if as_json else f"{name} is {source}\n")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    file: Annotated[
        str, typer.Option("-f", "--file", help="Modelfile to read.", metavar="FILE", show_default="Modelfile")
    ] = "Modelfile",
    quant: Annotated[
        str | None, options.option("--quant", text="Quantize the weights to int8 or int4 first.", metavar="QUANT")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Create a model from a Modelfile.

    NAME is then accepted by every other command and by clients of a server. The weights are not copied. The file
    is a Modelfile as in Ollama: FROM, PARAMETER, SYSTEM, TEMPLATE (in Jinja), MESSAGE and LICENSE. `localllm show
    NAME` shows it, `localllm rm NAME` removes the name.
    """
    from localllm.llm.create import create as create_model

    out = StdoutWriter()
    path = Path(file)
    edition = parse_modelfile(_read_modelfile(path))
    if is_path(edition.source) and not expand_path(edition.source).is_absolute():
        edition = replace(edition, source=str(path.parent / edition.source))
    create_model(CreateRequest(name, edition, quant=quant or ""), note)
    out.write(_edition_json(name) if as_json else f"{name}\n")


def _read_modelfile(file: Path) -> str:
    """Text of a Modelfile. Raises UsageError for a file that is too large, not text, or cannot be read."""
    try:
        if file.stat().st_size > TEXT_LIMIT:
            raise UsageError(f"{file} is too large for a Modelfile", "use another file with -f")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise UsageError(f"{file} cannot be read ({reason})", "name a Modelfile with -f") from None


def _edition_json(name: str) -> str:
    """The stored edition, which includes what it inherits from an edition that it is made from."""
    edition = find_edition(strip_latest(name))
    assert edition
    return json.dumps({"name": name, "edition": to_json(edition)}) + "\n"
