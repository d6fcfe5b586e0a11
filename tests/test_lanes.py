"""What `pytest` runs without being told which tests, beside `make test-all`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import QUICK, TESTS, collect_ignore

TABLE = "\n## Guarantees and their tests\n"


def held_in() -> Iterator[Path]:
    """The files and folders that ARCHITECTURE.md names; without `tests/`, beside the one before, or below."""
    page = (TESTS.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (.*) \|$", page.partition(TABLE)[2].partition("\n## ")[0], re.MULTILINE):
        beside = TESTS
        for name in re.findall(r"`([^`]*(?:/|\.py))`", row.rpartition(" | ")[2]):
            path = TESTS.parent / name if name.startswith("tests/") else beside / name
            beside = path.parent
            yield path


def test_every_file_that_holds_a_promise_is_there() -> None:
    paths = list(held_in())
    assert len(paths) > 50
    assert not [str(path) for path in paths if not path.exists()]


def test_every_promise_keeps_a_quick_test(pytestconfig: pytest.Config) -> None:
    if [Path(each).resolve() for each in pytestconfig.args] != [TESTS]:
        pytest.skip("only some of the tests were collected")
    quick = pytestconfig.stash[QUICK]
    left_out = [TESTS / name for name in collect_ignore]
    for path in held_in():
        if not any(path.is_relative_to(each) for each in left_out):
            assert any(file.is_relative_to(path) for file in quick), f"{path} has only slow tests"
