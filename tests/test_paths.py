from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.settings import Settings


def test_a_tilde_is_the_home_folder() -> None:
    assert expand_path("~/notes.md") == Path.home() / "notes.md"
    assert expand_path("a/~") == Path("a/~")


def test_an_unknown_home_folder_is_one_error_message() -> None:
    with pytest.raises(
        UsageError, match="the home folder ~nobody-here in ~nobody-here/x is unknown; use a full path"
    ):
        expand_path("~nobody-here/x")
    with pytest.raises(UsageError, match="nobody-here"):
        Settings.from_environment({"LOCALLLM_HOME": "~nobody-here"})
