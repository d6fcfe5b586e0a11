"""The file of step durations: bounded, and robust against what others wrote into it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from localllm.plan.step_times import MAX_SETUPS, MAX_STEPS, StepSetup, read, record

STEP = (1, 1, 100, 0, 0, 0, 0, 0.0123)
SETUP = StepSetup("demo", "a processor", "float32", "float32", 1)


def test_newest_steps_are_kept(tmp_path: Path) -> None:
    for first in (0, 3000):
        rows = [(1, 1, number, 0, 0, 0, 0, 0.5) for number in range(first, first + 3000)]
        record(tmp_path, SETUP, rows, pytest.fail)
    steps = read(tmp_path / "steps.jsonl", pytest.fail)[SETUP]
    assert [step[2] for step in steps] == list(range(6000 - MAX_STEPS, 6000))


def test_newest_setups_are_kept(tmp_path: Path) -> None:
    for number in [*range(MAX_SETUPS + 4), 5]:
        record(tmp_path, StepSetup(f"model {number}", "d", "float32", "float32", 1), [STEP], pytest.fail)
    setups = read(tmp_path / "steps.jsonl", pytest.fail)
    assert [setup.model for setup in setups] == [f"model {n}" for n in [4, *range(6, MAX_SETUPS + 4), 5]]
    assert len(setups[StepSetup("model 5", "d", "float32", "float32", 1)]) == 2


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "no json",
        json.dumps({**asdict(SETUP), "steps": [[1]]}),
        json.dumps({**asdict(SETUP), "steps": [[*STEP[:-1], -0.5]]}),
        json.dumps({**asdict(SETUP), "steps": [["1", *STEP[1:]]]}),
        json.dumps({**asdict(SETUP), "model": 1, "steps": []}),
    ],
)
def test_invalid_lines_are_skipped_with_a_note(tmp_path: Path, line: str) -> None:
    record(tmp_path, SETUP, [STEP], pytest.fail)
    file = tmp_path / "steps.jsonl"
    file.write_text(line + "\n" + file.read_text())
    notes: list[str] = []
    assert read(file, notes.append) == {SETUP: [STEP]}
    assert len(notes) == 1 and "1 of 2 lines" in notes[0]


def test_folder_that_is_not_writable(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "home").write_text("a file")
    record(tmp_path / "home", SETUP, [STEP], notes.append)
    assert any("could not be saved" in note for note in notes)
