"""`localllm pull` and `localllm verify`: download a model from the Hub, and check what was downloaded."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli import options, progress
from localllm.cli.io import StdoutWriter, note
from localllm.errors import DamagedModel, DiskFull, LocalLLMError, NotWritable, UsageError
from localllm.formatting import format_bytes, format_table
from localllm.hardware.device import resolve_device, total_bytes
from localllm.hub.catalog import CatalogEntry
from localllm.hub.names import RepoName, parse_name
from localllm.hub.resolve import edition_in_cache
from localllm.hub.verify import (
    FAULTY,
    FileState,
    Snapshot,
    file_states,
    find_snapshots,
    hash_all,
    known_digests,
    repair,
)
from localllm.plan.fit import FreeMemory, LoadOptions
from localllm.settings import Settings


def pull(
    model: options.ModelName,
    as_json: options.JsonEvents = False,
    force: Annotated[
        bool, options.switch("--force", text="Download the model even if it does not run on this machine.")
    ] = False,
) -> None:
    """Download a model from the Hub, or update it.

    MODEL is a name of `localllm list --all`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT for one model of a
    GGUF repository. A name without a format, like qwen3:8b, gets the edition that fits this machine: 4 bits, or
    more for a small model that stays fast. The files go into the Hugging Face cache, which other programs share.
    An interrupted download resumes. stdout gets the path of the model. Exits with code 3 before downloading if
    this machine has too little memory for the model.
    """
    from localllm.llm.fetch import fetch

    repo, settings = parse_name(model), Settings.from_environment()
    if isinstance(repo, CatalogEntry):
        raise UsageError(f"{model} comes with localllm and needs no download", f"run it: `localllm run {model}`")
    if not isinstance(repo, RepoName):
        raise UsageError(f"{model} is not a model of the Hub", "give ORG/REPO, or a name of `localllm list --all`")
    load_options = LoadOptions(dtype=settings.dtype, kv_dtype=settings.kv_dtype)
    if as_json:
        events = progress.JsonEvents()
        path = fetch(repo, events, lambda: total_memory(settings.device), load_options, force=force)
        events.write("done", path=str(path))
        return
    out = StdoutWriter()
    with progress.download_progress() as display:
        path = fetch(
            repo,
            display,
            lambda: total_memory(settings.device),
            load_options,
            force=force,
            on_choice=display.say,
        )
    out.write(f"{path}\n")


def total_memory(device: str) -> FreeMemory:
    """Total memory of a device, because programs that use it now may have ended when the model runs."""
    from localllm.plan.expected import memory_of

    resolved = resolve_device(device)
    return memory_of(resolved, total_bytes(resolved), Settings.from_environment())


def verify(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    check: Annotated[
        bool, options.switch("--check", text="Only report; do not download damaged or missing files.")
    ] = False,
    as_json: options.JsonList = False,
) -> None:
    """Check downloaded models against the checksums of the Hub.

    MODEL is a name of `localllm list`, ORG/REPO, ORG/REPO@REVISION, or ORG/REPO:QUANT; without it, all models in
    the cache are checked. Every file is read and compared with its checksum. Damaged and missing files are
    downloaded again.
    """
    repo = None if model is None else _parse_repo(model)
    out, snapshots = StdoutWriter(), find_snapshots(repo)
    digests = {path: digest for snapshot in snapshots for path, digest in known_digests(snapshot).items()}
    with progress.byte_progress("verifying", sum(path.stat().st_size for path in digests)) as advance:
        good = hash_all(digests, advance)
    results = [_verify_snapshot(snapshot, good, check, named=repo is not None) for snapshot in snapshots]
    if as_json:
        out.write(json.dumps([_result_json(result) for result in results], indent=1) + "\n")
    else:
        out.write(format_table([("NAME", "FILES", "SIZE", "STATE"), *map(_result_row, results)]) + "\n")
    bad = [result for result in results if result.unrepaired]
    if bad:
        raise _unrepaired_error(bad)


def _parse_repo(name: str) -> RepoName:
    repo = parse_name(name)
    if not isinstance(repo, RepoName):
        raise UsageError(f"{name} is not from the Hub, so there are no checksums for it", "give ORG/REPO")
    return edition_in_cache(repo)


@dataclass
class VerifyResult:
    """States of a snapshot's files by path, before and after its repair."""

    snapshot: Snapshot
    before: dict[str, FileState]
    after: dict[str, FileState]
    error: LocalLLMError | None = None  # that stopped the repair
    incomplete: bool = False  # nothing is damaged, and the missing files were not requested

    @property
    def repaired(self) -> list[str]:
        return [p for p, state in self.before.items() if state in FAULTY and self.after.get(p) is FileState.GOOD]

    @property
    def unrepaired(self) -> list[str]:
        """Paths of files that are still damaged or missing."""
        return [] if self.incomplete else [path for path, state in self.after.items() if state in FAULTY]


def _verify_snapshot(snapshot: Snapshot, good: dict[Path, bool], check_only: bool, *, named: bool) -> VerifyResult:
    """Check a snapshot, and repair it unless `check_only`. An interrupted download is resumed only if the model
    was named, not when all models are verified."""
    before = file_states(snapshot, good)
    faulty = {path: state for path, state in before.items() if state in FAULTY}
    if faulty and not named and FileState.DAMAGED not in faulty.values():
        note(f"{snapshot.repo} is incomplete; `localllm pull {snapshot.repo}` resumes the download")
        return VerifyResult(snapshot, before, before, incomplete=True)
    for path, state in faulty.items():
        note(f"{snapshot.repo}: {path} is {state}")
    if not faulty or check_only:
        return VerifyResult(snapshot, before, before)
    repair_error = None
    try:
        with progress.download_progress() as display:
            repair(snapshot, before, display)
    except LocalLLMError as error:
        repair_error = error
    good.update(hash_all({path: digest for path, digest in known_digests(snapshot).items() if not good.get(path)}))
    return VerifyResult(snapshot, before, file_states(snapshot, good), repair_error)


def _result_row(result: VerifyResult) -> tuple[str, ...]:
    after = Counter(result.after.values())
    counts = [f"{after[state]} {state}" for state in FileState if after[state] and state is not FileState.GOOD]
    if repaired := len(result.repaired):
        counts.insert(0, f"{repaired} downloaded again")
    nbytes = sum(file.size for file in result.snapshot.files())
    return (str(result.snapshot.repo), str(len(result.after)), format_bytes(nbytes), ", ".join(counts) or "good")


def _result_json(result: VerifyResult) -> dict[str, object]:
    snapshot = result.snapshot
    sizes = {file.path: file.size for file in snapshot.files()}
    files = [
        {"path": path, "bytes": sizes.get(path, 0), "state": state, "fetched_again": path in result.repaired}
        for path, state in result.after.items()
    ]
    return {
        "name": str(snapshot.repo),
        "repo": snapshot.repo.repo,
        "revision": snapshot.repo.revision,
        "commit": snapshot.commit,
        "path": str(snapshot.folder),
        "files": files,
    }


def _unrepaired_error(bad: list[VerifyResult]) -> LocalLLMError:
    """Error that names all files which are still damaged or missing; of the disk, if it cannot be written."""
    paths = [path for result in bad for path in result.unrepaired]
    files = paths[0] if len(paths) == 1 else f"{len(paths)} files"
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    state = "is damaged or missing" if len(paths) == 1 else "are damaged or missing"
    message = f"{files} of {bad[0].snapshot.repo}{others} {state}"
    repair_error = next((result.error for result in bad if result.error), None)
    if repair_error:
        error = type(repair_error) if isinstance(repair_error, DiskFull | NotWritable) else DamagedModel
        return error(f"{message}, and the download failed: {repair_error.message}", repair_error.remedy)
    return DamagedModel(message, f"download them again: `localllm verify {bad[0].snapshot.repo}`")
