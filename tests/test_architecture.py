"""ARCHITECTURE.md names files that exist, and counts their lines truly."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "localllm"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT)))
STEP = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_named_exists(path: str):
    places = (
        ROOT,
        ROOT / "tests",
        PACKAGE,
        PACKAGE / "runtime",
        PACKAGE / "runtime/kernels",
        ROOT / "tests/runtime",
    )
    assert any((place / path).exists() for place in places)


def test_one_decode_step_is_in_at_most_fifteen_files():
    assert 10 <= len(STEP) <= 15


@pytest.mark.parametrize(("file", "count"), STEP)
def test_the_count_of_lines_is_within_a_tenth(file: str, count: str):
    lines = len((PACKAGE / "runtime" / file).read_text(encoding="utf-8").splitlines())
    assert abs(lines - int(count)) <= lines / 10
