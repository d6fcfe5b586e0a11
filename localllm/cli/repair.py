"""What `localllm verify` does, with its progress and its report. Imports the Hub's library, so import it late."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from localllm.cli.io import AnswerWriter, note
from localllm.cli.progress import bar, shown
from localllm.columns import table
from localllm.errors import DamagedModel, LocalLLMError
from localllm.hub.names import RepoName
from localllm.hub.verify import FAULTY, Snapshot, State, blobs, hash_all, repair, snapshots, states
from localllm.units import size


@dataclass
class Result:
    """A model before and after it was mended, each a state by path."""

    found: Snapshot
    before: dict[str, State]
    after: dict[str, State]
    fault: LocalLLMError | None = None  # that kept it from being mended
    unfinished: bool = False  # nothing is damaged, and nobody asked for the rest of it

    @property
    def mended(self) -> list[str]:
        return [p for p, state in self.before.items() if state in FAULTY and self.after.get(p) is State.GOOD]

    @property
    def left(self) -> list[str]:
        """Files that are damaged or missing still."""
        return [] if self.unfinished else [path for path, state in self.after.items() if state in FAULTY]


def verify_models(repo: RepoName | None, check_only: bool, as_json: bool) -> None:
    """Raises ModelNotFound where nothing of that name is here, DamagedModel where something wrong stays so."""
    out, all_found = AnswerWriter(), snapshots(repo)
    todo = sorted({blob for found in all_found for blob in blobs(found)})
    with bar("verifying", sum(blob.stat().st_size for blob in todo)) as advanced:
        good = hash_all(todo, advanced)
    results = [_result(found, good, check_only, named=repo is not None) for found in all_found]
    if as_json:
        out.write(json.dumps([_as_json(result) for result in results], indent=1) + "\n")
    else:
        out.write(table([("NAME", "FILES", "SIZE", "STATE"), *map(_row, results)]) + "\n")
    bad = [result for result in results if result.left]
    if bad:
        raise _fault(bad)


def _result(found: Snapshot, good: dict[Path, bool], check_only: bool, *, named: bool) -> Result:
    """Mends it if it has to be, and if it may. Whoever asks for all models does not ask for a download that was
    broken off to go on."""
    before = states(found, good)
    faulty = {path: state for path, state in before.items() if state in FAULTY}
    if faulty and not named and State.DAMAGED not in faulty.values():
        note(f"{found.repo} is not whole; `localllm pull {found.repo}` goes on with it")
        return Result(found, before, before, unfinished=True)
    for path, state in faulty.items():
        note(f"{found.repo}: {path} is {state}")
    if not faulty or check_only:
        return Result(found, before, before)
    fault = None
    try:
        with shown() as show:
            repair(found, before, show)
    except LocalLLMError as error:
        fault = error
    good.update(hash_all([blob for blob in blobs(found) if not good.get(blob)]))
    return Result(found, before, states(found, good), fault)


def _row(result: Result) -> tuple[str, ...]:
    after = Counter(result.after.values())
    words = [f"{after[state]} {state}" for state in State if after[state] and state is not State.GOOD]
    if mended := len(result.mended):
        words.insert(0, f"{mended} fetched again")
    count = sum(file.size for file in result.found.files())
    return (str(result.found.repo), str(len(result.after)), size(count), ", ".join(words) or "good")


def _as_json(result: Result) -> dict[str, object]:
    found = result.found
    sizes = {file.path: file.size for file in found.files()}
    files = [
        {"path": path, "bytes": sizes.get(path, 0), "state": state, "fetched_again": path in result.mended}
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


def _fault(bad: list[Result]) -> DamagedModel:
    """One sentence on all that is still wrong."""
    left = [path for result in bad for path in result.left]
    files = left[0] if len(left) == 1 else f"{len(left)} files"
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    state = "is damaged or missing" if len(left) == 1 else "are damaged or missing"
    message = f"{files} of {bad[0].found.repo}{others} {state}"
    fault = next((result.fault for result in bad if result.fault), None)
    if fault:
        return DamagedModel(f"{message}, and not fetched again: {fault.message}", fault.remedy)
    return DamagedModel(message, f"`localllm verify {bad[0].found.repo}` fetches again what the Hub has")
