"""ARCHITECTURE.md names files that exist, with their number of lines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "localllm"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT)))
WAYS = {
    heading: re.findall(
        r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", TEXT.split(f"## {heading}\n")[1].split("\n## ")[0], re.MULTILINE
    )
    for heading in ("Path of a prompt", "Path of an HTTP request")
}
STEP = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|$", TEXT, re.MULTILINE)


def test_files_that_are_named_exist():
    folders = (
        ROOT,
        ROOT / "tests",
        PACKAGE,
        PACKAGE / "runtime",
        PACKAGE / "runtime/kernels",
        ROOT / "tests/runtime",
    )
    assert len(PATHS) > 150
    assert not [path for path in PATHS if not any((folder / path).exists() for folder in folders)]


def test_one_decode_step_is_in_at_most_fifteen_files():
    assert 10 <= len(STEP) <= 15


@pytest.mark.parametrize(("file", "count"), STEP)
def test_the_count_of_lines_is_within_a_tenth(file: str, count: str):
    lines = len((PACKAGE / "runtime" / file).read_text(encoding="utf-8").splitlines())
    assert abs(lines - int(count)) <= lines / 10


@pytest.mark.parametrize(
    ("heading", "most_files", "traced"),
    [("Path of a prompt", 30, "run"), ("Path of an HTTP request", 20, "http")],
)
def test_a_path_enters_each_file_once_in_call_order(heading: str, most_files: int, traced: str):
    way = [f"{file} {function}" for file, function in WAYS[heading]]
    assert 10 < len(way) <= most_files
    assert len({file for file, _ in WAYS[heading]}) == len(way)
    trace = subprocess.run(
        [sys.executable, "-m", "tests.call_trace", traced], cwd=ROOT, capture_output=True, text=True, check=True
    )
    calls = json.loads(trace.stdout)
    assert [call for call in calls if call in way] == way
    assert calls["hub/names.py parse_name"] == 1, "a name is resolved once"
