"""Paths for saved code: any input is handled."""

import pytest

from localllm.errors import UsageError
from localllm.tui.turn_screen import code_file_name, code_file_path


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("", "is a folder; name a file"),
        ("none/x.py", "there is no folder"),
        pytest.param("x" * 300, "File name too long; use another file", id="long"),
        ("~nobody-here/x.py", "use a full path"),
    ],
)
def test_an_unusable_path_is_one_error_message(tmp_path, monkeypatch, written, fault):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=fault):
        code_file_path(written)


@pytest.mark.parametrize(("language", "name"), [("python", "code.py"), ("", "code.txt"), ("../x", "code.txt")])
def test_a_file_is_named_as_its_language_has_it(language, name):
    assert code_file_name(language) == name
