import os
from pathlib import Path

import pytest

from localllm.conversation.attach import (
    MAX_FILE_BYTES,
    Attachment,
    dropped_file_references,
    escape_references,
    file_reference,
    prompt_with_files,
    read_attachments,
)
from localllm.conversation.chat import Chat
from localllm.errors import UsageError
from tests.cli.fake_engine import FakeLLM


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in ("notes.txt", "two words.txt", "end.", "sub/in.py", 'quo"te.txt', "it's.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("@notes.txt", ["notes.txt"]),
        ("see @notes.txt, and (not @sub/in.py)!", ["notes.txt", "sub/in.py"]),
        ("@notes.txt.", ["notes.txt"]),
        ("@end.", ["end."]),
        ('@"two words.txt" x', ["two words.txt"]),
        ("@'two words.txt'", ["two words.txt"]),
        (r"@two\ words.txt", ["two words.txt"]),
        ("@~/notes.txt", ["~/notes.txt"]),
        ("@./notes.txt\n@notes.txt @notes.txt", ["./notes.txt", "notes.txt"]),
        ("me@notes.txt, @, @@notes.txt, @nobody, @two words.txt", []),
        (r"\@notes.txt", []),
        ("@" + "x" * 5000, []),
        ("@\0 @~nobody/x", []),
    ],
)
def test_existing_files_are_attached(text, names):
    _, attached = read_attachments(text)
    assert [file.name for file in attached] == names
    assert all(file.text == Path(file.name).expanduser().read_text() for file in attached)


def test_the_reference_stays_in_the_text():
    assert read_attachments("see @notes.txt and @nobody")[0] == "see @notes.txt and @nobody"
    assert read_attachments(r"see \@notes.txt, C:\@x and \\x")[0] == r"see @notes.txt, C:\@x and \\x"


@pytest.mark.parametrize("text", [r"\@notes.txt", "@notes.txt and @nobody", '@"two words.txt"', r"x \@sub"])
def test_a_message_is_typed_again_as_it_was(text):
    written, attached = read_attachments(text)
    assert escape_references(written, attached) == text


def test_a_folder_is_refused():
    with pytest.raises(UsageError, match=r"^sub is a folder; use a file in it, or write \\@sub for plain text$"):
        read_attachments("what is in @sub")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b", "ü".encode("latin1")])
def test_a_binary_file_is_rejected(folder, content):
    (folder / "binary").write_bytes(content)
    with pytest.raises(UsageError, match="binary is not UTF-8 text; attach text files only"):
        read_attachments("@binary")


def test_a_file_above_the_size_limit_is_rejected(folder):
    (folder / "large").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(UsageError, match=r"large is larger than 1\.05 MB; attach a part of it"):
        read_attachments("@large")
    (folder / "large").write_bytes(b"x" * MAX_FILE_BYTES)
    assert len(read_attachments("@large")[1][0].text) == MAX_FILE_BYTES


def test_a_device_is_no_file():
    assert read_attachments("@/dev/zero")[1] == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_cannot_be_read_is_one_error_message(folder):
    (folder / "notes.txt").chmod(0)
    with pytest.raises(UsageError, match=r"notes\.txt cannot be read"):
        read_attachments("@notes.txt")


def test_the_model_reads_files_first_between_fences_that_hold(folder):
    (folder / "x.py").write_bytes(b"\xef\xbb\xbf```\r\ncode")
    written, attached = read_attachments("what does @x.py do?")
    assert prompt_with_files(written, attached) == "x.py:\n````py\n```\ncode\n````\n\nwhat does @x.py do?"
    chat = Chat(FakeLLM())
    list(chat.ask(written, attachments=attached))
    assert chat.model.asked[-1][0][-1]["content"] == prompt_with_files(written, attached)
    (folder / "x.py").unlink()
    list(chat.regenerate(chat.current))  # with the file as it was
    assert chat.model.asked[-1][0][-1]["content"] == prompt_with_files(written, attached)
    assert chat.current.question == written


@pytest.mark.parametrize(
    ("pasted", "text"),
    [
        ("{}/notes.txt", "@{}/notes.txt "),
        (" {}/notes.txt\n", "@{}/notes.txt "),
        (r"{}/two\ words.txt", '@"{}/two words.txt" '),
        ("'{}/two words.txt'", '@"{}/two words.txt" '),
        ("{}/two words.txt", '@"{}/two words.txt" '),
        ('"{}/two words.txt" {}/notes.txt', '@"{}/two words.txt" @{}/notes.txt '),
        ("file://{}/two%20words.txt", '@"{}/two words.txt" '),
        ("file://localhost{}/notes.txt\nfile://{}/sub/in.py", "@{}/notes.txt @{}/sub/in.py "),
        ('{}/quo\\"te.txt', "@'{}/quo\"te.txt' "),
        ("{}/it\\'s.txt", '@"{}/it\'s.txt" '),
        ("~/notes.txt", "@~/notes.txt "),
    ],
)
def test_a_path_as_terminals_write_it_becomes_a_reference(folder, pasted, text):
    found = dropped_file_references(pasted.replace("{}", str(folder)))
    assert found == text.replace("{}", str(folder))
    assert len(read_attachments(found)[1]) == len(found.split("@")) - 1


@pytest.mark.parametrize(
    "pasted",
    [
        "notes.txt",
        "{}",
        "{}/none.txt",
        "{}/notes.txt is it",
        "file://elsewhere{}/notes.txt",
        "file://[",
        "'",
        "",
        "/",
    ],
)
def test_other_pastes_are_unchanged(folder, pasted):
    assert dropped_file_references(pasted.replace("{}", str(folder))) is None
    assert dropped_file_references(f"{folder}/notes.txt " * 1000) is None


@pytest.mark.parametrize("name", ["a", "a b", "a'b", 'a"b', "a\\b", "a.", "ü/@x"])
def test_a_reference_means_its_path(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert [file.name for file in read_attachments(f"see {file_reference(name)} there")[1]] == [name]


def test_references_of_a_message_become_attachments():
    assert read_attachments("@notes.txt")[1] == (Attachment("notes.txt", "text of notes.txt\n"),)
