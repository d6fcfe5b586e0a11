"""Every promise of ARCHITECTURE.md names tests that exist, some of which are quick."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import QUICK, TESTS, collect_ignore

TABLE = "\n## Guarantees and their tests\n"


def promised_tests() -> Iterator[Path]:
    """Yield the files and folders of the table. A name without `tests/` is relative to the one before it."""
    page = (TESTS.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (.*) \|$", page.partition(TABLE)[2].partition("\n## ")[0], re.MULTILINE):
        folder = TESTS
        for name in re.findall(r"`([^`]*(?:/|\.py))`", row.rpartition(" | ")[2]):
            path = TESTS.parent / name if name.startswith("tests/") else folder / name
            folder = path.parent
            yield path


def test_every_file_of_a_promise_exists() -> None:
    paths = list(promised_tests())
    assert len(paths) > 50
    assert not [str(path) for path in paths if not path.exists()]


def test_every_promise_has_a_quick_test(pytestconfig: pytest.Config) -> None:
    if [Path(each).resolve() for each in pytestconfig.args] != [TESTS]:
        pytest.skip("only some of the tests were collected")
    quick = pytestconfig.stash[QUICK]
    left_out = [TESTS / name for name in collect_ignore]
    for path in promised_tests():
        if not any(path.is_relative_to(each) for each in left_out):
            assert any(file.is_relative_to(path) for file in quick), f"{path} has only slow tests"
