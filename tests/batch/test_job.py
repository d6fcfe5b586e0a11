"""Input and output of a batch without an engine: a run resumes any partial output, or refuses it."""

import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from localllm.batch.job import Job, OutputFile, OutputStream, iter_lines, read_contents, state_path
from localllm.batch.lines import encode_line
from localllm.errors import LocalLLMError, UsageError

ASKED = {"localllm": "1", "model": "demo", "seed": 0, "quant": None}
RAN = {"device": "cpu", "context": 64}


def line(place: int) -> dict[str, Any]:
    return {"custom_id": f"ä{place}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [json.dumps(line(place)) for place in range(5)]
    rows.insert(2, "no JSON")
    path.write_text("\n".join(rows) + "\n\n", encoding="utf-8")
    return path


def answer_all(source: Path, out: Path, stop_after: int = 100, ran: Any = RAN, **asked: Any) -> Job:
    """Answer every request with an error that contains its number."""
    opened = OutputFile(out)
    try:
        with source.open("rb") as file:
            job = Job(file, opened, ASKED | asked)
            job.begin(ran)
            for _, row in zip(range(stop_after), job.lines, strict=False):
                if row.error:
                    opened.write(encode_line(row.invalid_line_object(row.error)))
                else:
                    opened.write(encode_line(row.failure_object(LocalLLMError(f"answer {row.number}"))))
            job.close()
            return job
    finally:
        opened.close()


def test_a_run_resumed_at_any_byte_writes_the_same_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answer_all(source, out)
    whole = out.read_bytes()
    assert whole.count(b"\n") == 6
    for end in {
        *range(0, len(whole), 9),
        *(at + i for at, byte in enumerate(whole) if byte == 10 for i in (0, 1)),
    }:
        out.write_bytes(whole[:end])
        job = answer_all(source, out)
        assert out.read_bytes() == whole, f"cut at byte {end}"
        assert job.counts.resumed == whole[:end].count(b"\n")


def test_a_run_can_resume_repeatedly(source: Path, tmp_path: Path) -> None:
    answer_all(source, tmp_path / "once")
    for _ in range(4):
        answer_all(source, tmp_path / "often", stop_after=2)
    assert (tmp_path / "often").read_bytes() == (tmp_path / "once").read_bytes()


def test_counts_cover_the_complete_file(source: Path, tmp_path: Path) -> None:
    job = answer_all(source, tmp_path / "out", stop_after=4)
    assert (job.counts.total, job.counts.resumed, job.nothing_left) == (6, 0, False)
    job = answer_all(source, tmp_path / "out")
    assert (job.counts.resumed, job.counts.failed, job.nothing_left) == (4, 4, False)
    job = answer_all(source, tmp_path / "out")
    assert (job.counts.resumed, job.nothing_left, job.context) == (6, True, 64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda source: source.write_text(source.read_text() + json.dumps(line(9))), "another input"),
        (lambda source: {"seed": 1}, r"another seed \(0, now 1\)"),
        (lambda source: {"model": "other"}, r"another model \(demo, now other\)"),
        (lambda source: {"localllm": "2"}, "another localllm"),
        (lambda source: {"max_tokens": 3}, r"another max_tokens \(none, now 3\)"),
        (lambda source: {"ran": RAN | {"device": "cuda:0"}}, "another device"),
        (lambda source: {"ran": RAN | {"context": 32}}, "another context"),
    ],
)
def test_another_input_or_other_parameters_are_refused(
    source: Path, tmp_path: Path, change: Any, says: str
) -> None:
    out = tmp_path / "out"
    answer_all(source, out, stop_after=3)
    before = out.read_bytes()
    changed = change(source)
    with pytest.raises(UsageError, match=says):
        answer_all(source, out, **(changed if isinstance(changed, dict) else {}))
    assert out.read_bytes() == before


def test_lines_that_are_not_ours_are_refused_with_their_number(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer_all(source, out)
    rows = out.read_bytes().splitlines(keepends=True)
    swapped = [rows[1], rows[0], *rows[2:]]
    for wrong, place in ((swapped, 1), ([*rows, rows[0]], 7), ([rows[0], b"\0\0\0\n"], 2), ([b"[]\n"], 1)):
        out.write_bytes(b"".join(wrong))
        with pytest.raises(UsageError, match=f"line {place} of"):
            answer_all(source, out)
        assert out.read_bytes() == b"".join(wrong)


def test_a_foreign_file_is_left_untouched(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("my notes")
    with pytest.raises(UsageError, match=r"already exists, but there is no out\.state"):
        answer_all(source, out)
    state_path(out).write_text("{}x")
    with pytest.raises(UsageError, match="was not written by this version"):
        answer_all(source, out)
    assert out.read_text() == "my notes"


def test_the_settings_of_an_empty_output_are_ignored(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer_all(source, out, stop_after=0)
    assert answer_all(source, out, seed=4).counts.resumed == 0
    assert json.loads(state_path(out).read_text())["asked"]["seed"] == 4


def test_two_processes_cannot_write_the_same_file(tmp_path: Path) -> None:
    first = OutputFile(tmp_path / "out")
    with pytest.raises(UsageError, match="another process is writing"):
        OutputFile(tmp_path / "out")
    first.close()
    OutputFile(tmp_path / "out").close()


def test_an_unwritable_output_is_one_error_message(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "out"):
        with pytest.raises(UsageError, match="cannot be written"):
            OutputFile(path)


def test_an_input_that_changes_during_the_run_is_reported(source: Path, tmp_path: Path) -> None:
    out = OutputFile(tmp_path / "out")
    with source.open("rb") as file:
        job = Job(file, out, ASKED)
        job.check_input()
        source.write_text(source.read_text() + "\n")
        with pytest.raises(UsageError, match="input changed"):
            job.check_input()
        job.close()
    out.close()


def test_input_from_a_stream_starts_a_new_file_and_never_resumes(source: Path, tmp_path: Path) -> None:
    def job_of(out: OutputStream) -> Job:
        read, write = os.pipe()
        os.write(write, source.read_bytes())
        os.close(write)
        with open(read, "rb") as file:
            return Job(file, out, ASKED)

    out = OutputFile(tmp_path / "out")
    job = job_of(out)
    assert not job.resumable and job.counts.total is None
    job.begin(RAN)
    out.write(b"line\n")
    assert not state_path(out.path).exists()
    with pytest.raises(UsageError, match="already exists"):
        job_of(out)
    out.close()


def test_lines_have_the_numbers_that_editors_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.batch.job.MAX_LINE_BYTES", 20)
    text = b"\xef\xbb\xbfone\r\n\n  \ntwo\n" + b"x" * 50 + b"\nlast"
    found = list(iter_lines(io.BytesIO(text)))
    assert found == [(1, b"one\r\n"), (4, b"two\n"), (5, b"x" * 21), (6, b"last")]
    assert read_contents(io.BytesIO(text)).line_count == 4


def test_a_long_input_takes_no_more_memory(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        source = tmp_path / f"{count}.jsonl"
        with source.open("w") as file:
            for place in range(count):
                file.write(json.dumps(line(place)) + "\n")
        tracemalloc.start()
        with source.open("rb") as file:
            job = Job(file, OutputStream(1), ASKED)
            assert sum(1 for _ in job.lines) == count
            job.close()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(6_000) < peak(1_000) + 100_000
