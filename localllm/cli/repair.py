"""What `localllm verify` does, with its progress and its report. Imports the Hub's library, so import it late."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from localllm.cli.io import StdoutWriter, note
from localllm.cli.progress import byte_progress, download_progress
from localllm.errors import DamagedModel, DiskFull, LocalLLMError, NotWritable
from localllm.formatting import format_bytes, format_table
from localllm.hub.names import RepoName
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


@dataclass
class VerifyResult:
    """A model before and after it was mended, each a state by path."""

    snapshot: Snapshot
    before: dict[str, FileState]
    after: dict[str, FileState]
    fault: LocalLLMError | None = None  # that kept it from being mended
    incomplete: bool = False  # nothing is damaged, and nobody asked for the rest of it

    @property
    def repaired(self) -> list[str]:
        return [p for p, state in self.before.items() if state in FAULTY and self.after.get(p) is FileState.GOOD]

    @property
    def unrepaired(self) -> list[str]:
        """Files that are damaged or missing still."""
        return [] if self.incomplete else [path for path, state in self.after.items() if state in FAULTY]


def verify_models(repo: RepoName | None, check_only: bool, as_json: bool) -> None:
    """Raises ModelNotFound where nothing of that name is here, DamagedModel where something wrong stays so,
    DiskFull or NotWritable where the disk is why."""
    out, all_found = StdoutWriter(), find_snapshots(repo)
    todo = {path: digest for found in all_found for path, digest in known_digests(found).items()}
    with byte_progress("verifying", sum(path.stat().st_size for path in todo)) as advanced:
        good = hash_all(todo, advanced)
    results = [_verify_snapshot(found, good, check_only, named=repo is not None) for found in all_found]
    if as_json:
        out.write(json.dumps([_result_json(result) for result in results], indent=1) + "\n")
    else:
        out.write(format_table([("NAME", "FILES", "SIZE", "STATE"), *map(_table_row, results)]) + "\n")
    bad = [result for result in results if result.unrepaired]
    if bad:
        raise _unrepaired_error(bad)


def _verify_snapshot(found: Snapshot, good: dict[Path, bool], check_only: bool, *, named: bool) -> VerifyResult:
    """Mends it if it has to be, and if it may. Whoever asks for all models does not ask for a download that was
    broken off to go on."""
    before = file_states(found, good)
    faulty = {path: state for path, state in before.items() if state in FAULTY}
    if faulty and not named and FileState.DAMAGED not in faulty.values():
        note(f"{found.repo} is not whole; `localllm pull {found.repo}` goes on with it")
        return VerifyResult(found, before, before, incomplete=True)
    for path, state in faulty.items():
        note(f"{found.repo}: {path} is {state}")
    if not faulty or check_only:
        return VerifyResult(found, before, before)
    fault = None
    try:
        with download_progress() as show:
            repair(found, before, show)
    except LocalLLMError as error:
        fault = error
    good.update(hash_all({path: digest for path, digest in known_digests(found).items() if not good.get(path)}))
    return VerifyResult(found, before, file_states(found, good), fault)


def _table_row(result: VerifyResult) -> tuple[str, ...]:
    after = Counter(result.after.values())
    words = [f"{after[state]} {state}" for state in FileState if after[state] and state is not FileState.GOOD]
    if mended := len(result.repaired):
        words.insert(0, f"{mended} fetched again")
    count = sum(file.size for file in result.snapshot.files())
    return (str(result.snapshot.repo), str(len(result.after)), format_bytes(count), ", ".join(words) or "good")


def _result_json(result: VerifyResult) -> dict[str, object]:
    found = result.snapshot
    sizes = {file.path: file.size for file in found.files()}
    files = [
        {"path": path, "bytes": sizes.get(path, 0), "state": state, "fetched_again": path in result.repaired}
        for path, state in result.after.items()
    ]
    return {
        "name": str(found.repo),
        "repo": found.repo.repo,
        "revision": found.repo.revision,
        "commit": found.commit,
        "path": str(found.folder),
        "files": files,
    }


def _unrepaired_error(bad: list[VerifyResult]) -> LocalLLMError:
    """One sentence on all that is still wrong. A disk that cannot be written keeps its own exit code."""
    left = [path for result in bad for path in result.unrepaired]
    files = left[0] if len(left) == 1 else f"{len(left)} files"
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    state = "is damaged or missing" if len(left) == 1 else "are damaged or missing"
    message = f"{files} of {bad[0].snapshot.repo}{others} {state}"
    fault = next((result.fault for result in bad if result.fault), None)
    if fault:
        error = type(fault) if isinstance(fault, DiskFull | NotWritable) else DamagedModel
        return error(f"{message}, and not fetched again: {fault.message}", fault.remedy)
    return DamagedModel(message, f"`localllm verify {bad[0].snapshot.repo}` fetches again what the Hub has")
