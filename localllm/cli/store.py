"""`localllm rm`, `cp` and `verify`: what is done with models that are on this machine."""

import json
from collections import defaultdict
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter
from localllm.cli.models import artefact_source
from localllm.errors import UsageError
from localllm.formatting import format_bytes
from localllm.hub.assign_name import assigned_target, copy_name, remove_name
from localllm.hub.local_names import edition_files, read_aliases
from localllm.hub.names import RepoName, parse_name, strip_latest
from localllm.hub.remove import Removal, plan_removal, removable_repo
from localllm.hub.resolve import edition_in_cache
from localllm.quantize.store import find_artefacts
from localllm.settings import Settings

ModelNames = Annotated[list[str], typer.Argument(metavar="MODEL", hidden=True)]
OptionalModelName = Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)]
DryRun = Annotated[bool, options.switch("--dry-run", text="Print what would be removed without removing it.")]
CheckOnly = Annotated[
    bool, options.switch("--check", text="Only report; do not download damaged or missing files.")
]


def rm(
    model: ModelNames,
    quant: options.ArtefactQuant = None,
    dry_run: DryRun = False,
    as_json: options.JsonList = False,
) -> None:
    """Remove models from this machine.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a GGUF
    repository. Files shared with other revisions remain. For a name created by `localllm cp`, only the name is
    removed. With --quant, only the cached quantization is removed, not the model.
    """
    if quant:
        _remove_artefacts(model, quant, dry_run, as_json)
        return
    out, known = StdoutWriter(), {*read_aliases(), *edition_files()}
    model = [strip_latest(name) for name in model]
    targets = [None if name in known else removable_repo(name) for name in model]  # before anything is removed
    for target in targets:
        if target:
            plan_removal(target)
    done: list[dict[str, object]] = []
    for name, target in zip(model, targets, strict=True):
        if target is None:
            meant = assigned_target(name) if dry_run else remove_name(name)
            done.append({"name": name, "alias_of": meant, "freed_bytes": 0, "dry_run": dry_run})
            text = f"the name {name} of {meant}; the model stays"
        else:
            plan = plan_removal(target)
            freed = plan.freed_bytes if dry_run else plan.execute()
            done.append(_removal_json(name, plan, freed, dry_run))
            text = _describe_removal(plan, freed)
        if not as_json:
            out.write(f"{'would remove' if dry_run else 'removed'} {text}\n")
    if as_json:
        out.write(json.dumps(done, indent=1) + "\n")


def _remove_artefacts(models: list[str], quant: str, dry_run: bool, as_json: bool) -> None:
    out, home = StdoutWriter(), Settings.from_environment().home
    found = [
        (name, find_artefacts(home, artefact_source(name), quant)) for name in models
    ]  # before anything is removed
    done: list[dict[str, object]] = []
    for name, each in found:
        freed = sum(one.nbytes if dry_run else one.remove() for one in each)
        paths = [str(one.path) for one in each]
        done.append({"name": name, "quant": quant, "paths": paths, "freed_bytes": freed, "dry_run": dry_run})
        if not as_json:
            out.write(
                f"{'would remove' if dry_run else 'removed'} {name} --quant {quant}, frees {format_bytes(freed)}\n"
            )
    if as_json:
        out.write(json.dumps(done, indent=1) + "\n")


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
    meant = copy_name(name, model)
    out.write(json.dumps({"name": name, "source": meant}) + "\n" if as_json else f"{name} is {meant}\n")


def verify(model: OptionalModelName = None, check: CheckOnly = False, as_json: options.JsonList = False) -> None:
    """Check downloaded models against the checksums of the Hub.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT; without it, all models in
    the cache are checked. Every file is read and compared with its checksum. Damaged and missing files are
    downloaded again.
    """
    # Loads the Hub's library, which other commands need not wait for.
    from localllm.cli.repair import verify_models

    verify_models(None if model is None else _require_hub_name(model), check, as_json)


def _require_hub_name(name: str) -> RepoName:
    repo = parse_name(name)
    if not isinstance(repo, RepoName):
        raise UsageError(f"{name} is not from the Hub: nobody says what it should hold", "name ORG/REPO")
    return edition_in_cache(repo)


def _describe_removal(plan: Removal, freed: int) -> str:
    unfinished = f" and {_count_files(len(plan.unfinished))} of broken off downloads" if plan.unfinished else ""
    reasons: defaultdict[str, int] = defaultdict(int)
    for kept in plan.kept:
        reasons[kept.why] += kept.size
    lines = [f"{plan.repo}: {_count_files(len(plan.files))}{unfinished}, frees {format_bytes(freed)}"]
    return "\n".join(lines + [f"kept {format_bytes(count)}: {why}" for why, count in reasons.items()])


def _count_files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _removal_json(name: str, plan: Removal, freed: int, dry_run: bool) -> dict[str, object]:
    return {
        "name": name,
        "repo": plan.repo.repo,
        "revision": plan.repo.revision,
        "files": [file.path for file in plan.files],
        "unfinished": len(plan.unfinished),
        "freed_bytes": freed,
        "kept": [{"path": kept.path, "bytes": kept.size, "why": kept.why} for kept in plan.kept],
        "dry_run": dry_run,
    }
