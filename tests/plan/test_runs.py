"""Recorded answers: saved, bounded, compared by setup, and robust to a damaged file."""

from dataclasses import replace
from pathlib import Path

from localllm.plan.runs import MAX_RUNS, Run, median_rates, read, record

RUN = Run("tiny", "a processor", "bfloat16", "BF16", 2, 100, 1e9, 10.0, 1e11)


def silent(text: str) -> None:
    raise AssertionError(text)


def test_runs_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert read(home / "runs.jsonl", silent) == []
    other = replace(RUN, model="größer", flops_per_s=None)
    record(home, RUN, silent)
    record(home, other, silent)
    assert read(home / "runs.jsonl", silent) == [RUN, other]


def test_the_oldest_of_too_many_are_forgotten(tmp_path: Path) -> None:
    for i in range(MAX_RUNS + 3):
        record(tmp_path, replace(RUN, context=i), silent)
    assert [run.context for run in read(tmp_path / "runs.jsonl", silent)] == list(range(3, MAX_RUNS + 3))


def test_a_line_that_is_no_run_is_passed_over_with_a_note(tmp_path: Path) -> None:
    record(tmp_path, RUN, silent)
    file = tmp_path / "runs.jsonl"
    good = file.read_text()
    for bad in (
        '{"model": "x"}',
        "[]",
        "3",
        "\x00\x01",
        '{"a":',
        good.strip().replace("10.0", "-1"),
        "[" * 10_000,
    ):
        file.write_text(f"{bad}\n{good}")
        notes: list[str] = []
        assert read(file, notes.append) == [RUN]
        assert notes == [f"note: 1 of 2 lines of {file} are invalid and ignored"]
    file.write_text(good.replace("10.0", "NaN"))
    assert read(file, notes.append) == []
    file.write_bytes(b"\xff\xfe" + good.encode())
    assert read(file, notes.append) == []


def test_an_unwritable_home_is_reported(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    notes: list[str] = []
    record(tmp_path / "home", RUN, notes.append)
    assert "could not be saved" in notes[-1]


def test_runs_of_the_same_model_count_before_those_of_others() -> None:
    slow = replace(RUN, model="other", tokens_per_s=1.0)
    found = median_rates([RUN, replace(RUN, tokens_per_s=12.0), replace(RUN, tokens_per_s=30.0), slow], RUN)
    assert found
    assert (found.bandwidth, found.count) == (12e9, 3)
    found = median_rates([slow], RUN)
    assert found and found.bandwidth == 1e9


def test_runs_of_another_setup_or_size_are_ignored() -> None:
    others = [
        replace(RUN, device="another"),
        replace(RUN, dtype="float32"),
        replace(RUN, form="Q4_K"),
        replace(RUN, threads=1),
        replace(RUN, bytes_per_token=1e7),
    ]
    assert median_rates(others, RUN) is None
