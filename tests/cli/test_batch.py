"""`localllm batch` as a process with a real model: killed, interrupted, piped, and its output."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from localllm.batch.summary import BatchCounts
from localllm.cli.batch import batch_progress
from localllm.cli.progress import LINE_INTERVAL_S
from tests.scripted import write_scripted

LINES = 1000
PIECES = ("Yes", ",", " it", " is", " so", ".")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_scripted(tmp_path_factory.mktemp("model") / "tiny", PIECES))


def request(custom_id: str, body: dict[str, Any], kind: str = "chat/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{kind}", "body": body}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats and prompts at a high temperature, so that every seed gives another answer; one line in a hundred is
    invalid.
    """
    draw = random.Random(1)
    rows = []
    for place in range(LINES):
        text = "word " * draw.randrange(1, 9)
        row: Any = request(f"q-{place}", chat(text, temperature=5))
        if place % 3 == 0:
            row = request(f"q-{place}", {"prompt": text, "max_tokens": 4, "temperature": 5}, "completions")
        rows.append("no JSON" if place % 100 == 50 else json.dumps(row))
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-m", "localllm", "batch", *map(str, arguments)]
    return subprocess.Popen(command, **streams, start_new_session=True)


def finish(process: subprocess.Popen[bytes], piped: bytes | None = None) -> tuple[int, str, str]:
    out, err = process.communicate(piped, timeout=120)
    return process.returncode, out.decode(), err.decode()


def until_written(process: subprocess.Popen[bytes], out: Path, size: int) -> None:
    while process.poll() is None and (not out.exists() or out.stat().st_size < size):
        time.sleep(0.001)


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in text.splitlines()]


@pytest.fixture(scope="module")
def answers(model: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Output of one uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    code, _, err = finish(start(source, "-o", out, "--model", model))
    assert code == 9, err
    return out.read_bytes()


@pytest.mark.slow
def test_a_thousand_lines_interrupted_four_times_give_the_same_file(
    model: str, source: Path, answers: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    sizes = sorted(random.sample(range(1, len(answers) * 3 // 4), 4))
    reached = []
    for size, how in zip(sizes, (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGKILL), strict=True):
        before = out.stat().st_size if out.exists() else 0
        process = start(source, "-o", out, "--model", model)
        until_written(process, out, max(size, before + 1))  # not while Python itself starts
        process.send_signal(how)
        code, _, err = finish(process)
        ended = (-how, "")
        if how is signal.SIGINT:
            ended = (130, "interrupted; run the same command again to resume\n")
        assert (code, err) == ended, f"before byte {size} of {sizes}"
        reached.append(out.stat().st_size)
    assert 0 < reached[0] < reached[-1] < len(answers)
    code, _, err = finish(start(source, "-o", out, "--model", model))
    assert out.read_bytes() == answers, f"broken off at {reached}"
    kept = answers[: reached[-1]].count(b"\n")
    assert (code, f"1,000 lines: 990 ok, 10 failed, {kept} of them by an earlier run" in err) == (9, True), err


@pytest.mark.slow
def test_answers_are_in_input_order(answers: bytes, source: Path) -> None:
    asked = [None if row == "no JSON" else json.loads(row)["custom_id"] for row in source.read_text().splitlines()]
    rows = rows_of(answers.decode())
    assert [row["custom_id"] for row in rows] == asked
    assert len({row["id"] for row in rows}) == LINES
    said = [row["response"]["body"]["choices"][0] for row in rows if row["response"]]
    assert len({json.dumps(choice) for choice in said}) > LINES / 2  # else a swap would not show


def test_repeating_a_finished_command_computes_nothing(
    model: str, source: Path, tmp_path: Path, real: Callable[..., tuple[int, str, str]]
) -> None:
    short, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    short.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[:9]))
    assert finish(start(short, "-o", out, "--model", model, "--seed", 1))[0] == 0
    before = out.read_bytes()
    command = ("batch", str(short), "-o", str(out), "--model", model)
    code, _, err = real(*command, "--seed", "1")
    assert (code, "nothing remained to do" in err, out.read_bytes()) == (0, True, before)
    code, _, err = real(*command)
    assert (code, out.read_bytes()) == (2, before)
    assert "was started with another seed (1, now 0); use another file, or remove" in err
    state = json.loads((tmp_path / "out.jsonl.state").read_text())
    assert (state["asked"]["deterministic"], state["ran"]["deterministic"]) == (True, True)
    code, _, err = real(*command, "--seed", "1", "--no-deterministic")
    assert (code, "another deterministic (True, now False)" in err, out.read_bytes()) == (2, True, before)


WRONG = [
    request("image", chat("") | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    request("many", chat("x", n=200)),
    request("long", chat("word " * 900)),
    request("url", {}, "embeddings"),
    request("good", chat("x")),
    request("tool", chat("x", tools=[{"type": "function", "function": {}}])),
    {"custom_id": "body"},
    request("ban", chat("x", logit_bias={"100000": 1})),
    request("texts", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 0}, "completions"),
]


@pytest.mark.slow
def test_failed_lines_are_reported_in_order_and_the_run_continues(model: str, tmp_path: Path) -> None:
    piped = "\n".join([*map(json.dumps, WRONG), "no JSON", *map(json.dumps, WRONG[4:5])]).encode()
    out = tmp_path / "out.jsonl"
    process = start("-", "-o", out, "--model", model, "--context", 512, "--json", stdin=subprocess.PIPE)
    code, printed, err = finish(process, piped)
    rows = rows_of(out.read_text())
    status = [row["response"]["status_code"] if row["response"] else row["error"]["code"] for row in rows]
    missing, no_json, again = "missing_required_parameter", "invalid_json_line", "duplicate_custom_id"
    assert status == [400, 400, 400, "invalid_url", 200, 400, missing, 400, 200, no_json, again]
    errors = [row["response"]["body"].get("error") for row in rows if row["response"]]
    assert [error and (error["code"], error["param"]) for error in errors] == [
        (None, "messages.0.content.0.type"),
        (None, "n"),
        ("context_length_exceeded", None),
        None,
        (None, "tools.0.function.name"),
        (None, None),
        None,
    ]
    assert [choice["text"][0] for choice in rows[8]["response"]["body"]["choices"]] == ["a", "b"]
    assert (code, "9 of 11 requests failed" in err) == (9, True)
    summary = json.loads(printed)
    assert (summary["lines"], summary["ok"], summary["failed"], summary["kept"]) == (11, 2, 9, 0)
    usage = [row["response"]["body"]["usage"] for row in rows if status[rows.index(row)] == 200]
    assert summary["prompt_tokens"] == sum(one["prompt_tokens"] for one in usage)
    assert summary["answer_tokens"] == sum(one["completion_tokens"] for one in usage)
    assert summary["tokens_per_s"] == pytest.approx(summary["answer_tokens"] / summary["seconds"])
    assert summary["tokens_per_step"] == pytest.approx(summary["answer_tokens"] / summary["steps"])
    assert "prompt_tokens_details" not in usage[0]  # would tell what else was running


@pytest.mark.slow
def test_an_answer_that_breaks_its_schema_fails_alone_and_truncation_is_reported(
    model: str, tmp_path: Path
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "Yes"}}}
    nested = json.dumps(request("deep", chat("x", metadata=0))).replace(": 0", ": " + "[" * 900 + "]" * 900)
    rows = [
        request("whole", chat("x", response_format=form, max_tokens=20)),
        request("cut", chat("x", response_format=form, max_tokens=2)),
        request("stopped", chat("x", response_format=form, max_tokens=20, stop="e")),
    ]
    piped = "\n".join([*map(json.dumps, rows), nested]).encode()
    code, printed, err = finish(start("-", "--model", model, stdin=subprocess.PIPE), piped)
    whole, cut, stopped, deep = rows_of(printed)
    said, part = (row["response"]["body"]["choices"][0] for row in (whole, cut))
    assert (said["message"]["content"], said["finish_reason"], part["finish_reason"]) == (
        '"Yes"',
        "stop",
        "length",
    )
    assert stopped["response"]["status_code"] == 500
    assert "the answer is not JSON" in stopped["response"]["body"]["error"]["message"]
    assert "nested" in deep["error"]["message"]
    assert (code, "2 of 4 requests failed" in err) == (9, True)


@pytest.mark.slow
def test_a_pipe_gets_the_lines_and_nothing_else(model: str, answers: bytes, source: Path) -> None:
    first = b"".join(source.read_bytes().splitlines(keepends=True)[:5])
    process = start("-", "--model", model, stdin=subprocess.PIPE)
    code, printed, err = finish(process, first)
    assert (code, printed.encode()) == (0, b"".join(answers.splitlines(keepends=True)[:5]))
    assert "5 lines: 5 ok, 0 failed\n" in err


@pytest.mark.slow
def test_invalid_options_are_rejected_before_the_model_is_loaded(source: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ((source, "--model", "x", "--json"), "cannot both go to stdout"),
        ((tmp_path / "none", "--model", "x"), "cannot be read: No such file"),
        ((source,), "missing option '--model'"),
        ((source, "-o", tmp_path, "--model", "x"), "cannot be written"),
        ((source, "--model", "no/such/model"), "no/such/model"),
    ):
        code, printed, err = finish(start(*arguments, env=os.environ | {"HF_HUB_OFFLINE": "1"}))
        assert (code in (2, 8), printed, says in err) == (True, "", True), err


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(screen: Any, capsys: Any) -> None:
    counts = BatchCounts(total=8_000, ok=3, failed=1, answer_tokens=50)
    with redirect_stderr(screen), batch_progress(resumable=True) as show:
        show(counts)
    assert any(re.match(r"answering .* 4/8000 \S+ tokens/s, 1 failed ", frame) for frame in screen.frames())
    with pytest.raises(KeyboardInterrupt), batch_progress(resumable=False) as show:
        show(counts)
        show.last -= LINE_INTERVAL_S
        show(BatchCounts(total=8_000, ok=5, answer_tokens=50))
        show(counts)  # too soon for another line
        raise KeyboardInterrupt
    assert re.fullmatch(r"5 of 8,000 lines, \S+ tokens/s\ninterrupted\n", capsys.readouterr().err)
