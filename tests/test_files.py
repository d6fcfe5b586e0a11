from pathlib import Path

import pytest

from localllm.errors import DamagedModel, UsageError
from localllm.files import MAX_JSON_BYTES, expand_path, read_json, write_atomic, write_user_file
from localllm.settings import Settings


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 10**5], ids=repr
)
def test_a_file_without_a_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(DamagedModel, match=r"config\.json is damaged"):
        read_json(file)


def test_a_missing_file_is_an_empty_object(tmp_path: Path) -> None:
    assert read_json(tmp_path / "config.json") == {}


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(DamagedModel, match="larger than any"):
        read_json(file)


def test_writes_are_atomic(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kept.json"
    write_atomic(file, "first")
    write_atomic(file, "second ❤")
    assert file.read_text(encoding="utf-8") == "second ❤"
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "half \udcff")
    assert file.read_text(encoding="utf-8") == "second ❤"
    assert [path.name for path in file.parent.iterdir()] == ["kept.json"]


def test_a_user_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    write_user_file(file, "one", overwrite=False)
    with pytest.raises(FileExistsError):
        write_user_file(file, "two", overwrite=False)
    assert file.read_text() == "one"
    write_user_file(file, "two", overwrite=True)
    assert file.read_text() == "two"


@pytest.mark.parametrize("name", ["none/x", "x" * 300, "a\0b", "."], ids=["folder", "length", "zero", "itself"])
def test_an_unwritable_user_file_is_one_error_message(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)cannot be written: .*; use another file"):
        write_user_file(tmp_path / name, "text", overwrite=True)


def test_text_that_cannot_be_encoded_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="surrogates"):
        write_user_file(tmp_path / "x", "\ud800", overwrite=False)
    assert not (tmp_path / "x").exists()


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
