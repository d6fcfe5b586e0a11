"""`localllm rm`, `cp` and `verify`: what is done with models that are on this machine."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.io import AnswerWriter
from localllm.cli.models import source_of
from localllm.errors import ModelNotFound, UsageError
from localllm.hub.aliases import aliases, set_alias
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.hub.names import ALIAS, RepoName, is_path, parse
from localllm.hub.remove import Removal, plan_removal
from localllm.quantize.store import kept_of
from localllm.settings import Settings
from localllm.units import size

Models = Annotated[list[str], typer.Argument(metavar="MODEL", hidden=True)]
MaybeModel = Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)]
DryRun = Annotated[bool, options.switch("--dry-run", text="Say what would be removed, and remove nothing.")]
CheckOnly = Annotated[bool, options.switch("--check", text="Fetch nothing again.")]


def rm(
    model: Models, quant: options.OfQuant = None, dry_run: DryRun = False, as_json: options.JsonList = False
) -> None:
    """Remove models from this machine.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a
    repository of GGUF files. What other revisions use stays. Of a name that you gave with `localllm cp`, the name
    alone is removed. With --quant the model stays, and what was quantized from it goes.
    """
    if quant:
        _rm_kept(model, quant, dry_run, as_json)
        return
    out, known = AnswerWriter(), aliases()
    targets = [None if name in known else _removable(name) for name in model]  # before anything is removed
    for target in targets:
        if target:
            plan_removal(target)
    done: list[dict[str, object]] = []
    for name, target in zip(model, targets, strict=True):
        if target is None:
            if not dry_run:
                set_alias(name, None)
            done.append({"name": name, "alias_of": known[name], "freed_bytes": 0, "dry_run": dry_run})
            text = f"the name {name} of {known[name]}; the model stays"
        else:
            plan = plan_removal(target)
            freed = plan.frees if dry_run else plan.execute()
            done.append(_as_json(name, plan, freed, dry_run))
            text = _told(plan, freed)
        if not as_json:
            out.write(f"{'would remove' if dry_run else 'removed'} {text}\n")
    if as_json:
        out.write(json.dumps(done, indent=1) + "\n")


def _rm_kept(models: list[str], quant: str, dry_run: bool, as_json: bool) -> None:
    out, home = AnswerWriter(), Settings.from_environment().home
    found = [(name, kept_of(home, source_of(name), quant)) for name in models]  # before anything is removed
    done: list[dict[str, object]] = []
    for name, each in found:
        freed = sum(one.nbytes if dry_run else one.remove() for one in each)
        paths = [str(one.path) for one in each]
        done.append({"name": name, "quant": quant, "paths": paths, "freed_bytes": freed, "dry_run": dry_run})
        if not as_json:
            out.write(f"{'would remove' if dry_run else 'removed'} {name} --quant {quant}, frees {size(freed)}\n")
    if as_json:
        out.write(json.dumps(done, indent=1) + "\n")


def cp(
    model: options.ModelName,
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    as_json: options.Json = False,
) -> None:
    """Give a model another name.

    NAME becomes a name of MODEL, which is what `localllm run` takes: a name of `localllm list --all`, ORG/REPO
    with @REVISION or :QUANT, or a path. Nothing is copied: the disk holds the model once. `localllm rm NAME` takes
    the name away.
    """
    out = AnswerWriter()
    if not ALIAS.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a name", "use letters, digits, '.', '_', '-' and at most one colon")
    if name in catalog():
        raise UsageError(f"{name} is a model that `localllm list --all` knows", "choose another name")
    if is_path(name):
        raise UsageError(f"{name} reads as the path of a file or folder", "choose another name")
    meant = _lasting(model)
    set_alias(name, meant)
    out.write(json.dumps({"name": name, "source": meant}) + "\n" if as_json else f"{name} is {meant}\n")


def verify(model: MaybeModel = None, check: CheckOnly = False, as_json: options.JsonList = False) -> None:
    """Look whether downloaded models are what the Hub gave.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT; without it, all models in
    the cache. Every file is read and compared with its digest. What is damaged or missing is fetched again.
    """
    # Loads the Hub's library, which other commands need not wait for.
    from localllm.cli.repair import verify_models

    verify_models(None if model is None else _from_hub(model), check, as_json)


def _removable(name: str) -> RepoName:
    match parse(name):
        case RepoName() as repo:
            return repo
        case CatalogEntry():
            raise UsageError(f"{name} comes with localllm and stays", "`localllm list` shows what was downloaded")
        case Path() as path:
            raise UsageError(f"{name} is a path, and only downloads are removed", f"delete it: `rm -r {path}`")


def _from_hub(name: str) -> RepoName:
    repo = parse(name)
    if not isinstance(repo, RepoName):
        raise UsageError(f"{name} is not from the Hub: nobody says what it should hold", "name ORG/REPO")
    return repo


def _lasting(source: str) -> str:
    """What a name stands for, wherever and whenever it is used."""
    match parse(source):
        case RepoName() as repo:
            return str(repo)
        case CatalogEntry() as entry:
            return entry.name
        case Path() as path:
            if not path.exists():
                raise ModelNotFound(f"there is no folder or file {source}", "give the path of a model")
            return str(path.absolute())


def _told(plan: Removal, freed: int) -> str:
    unfinished = f" and {_files(len(plan.unfinished))} of broken off downloads" if plan.unfinished else ""
    reasons: defaultdict[str, int] = defaultdict(int)
    for kept in plan.kept:
        reasons[kept.why] += kept.size
    lines = [f"{plan.repo}: {_files(len(plan.files))}{unfinished}, frees {size(freed)}"]
    return "\n".join(lines + [f"kept {size(count)}: {why}" for why, count in reasons.items()])


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _as_json(name: str, plan: Removal, freed: int, dry_run: bool) -> dict[str, object]:
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
