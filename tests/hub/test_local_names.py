import pytest

from localllm.errors import DamagedModel, ModelNotFound, UsageError
from localllm.hub.catalog import catalog
from localllm.hub.local_names import aliases_file, read_aliases, set_alias
from localllm.hub.names import RepoName, is_path, parse_name, similar_names


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_aliases_last_until_removed(home):
    assert read_aliases() == {}
    set_alias("mine", "org/repo@v1:Q8_0")
    set_alias("other", "demo")
    set_alias("mine", "org/repo@v2")
    assert read_aliases() == {"mine": "org/repo@v2", "other": "demo"}
    set_alias("mine", None)
    assert read_aliases() == {"other": "demo"}
    assert [file.name for file in home.iterdir()] == ["aliases.json"]


def test_an_alias_resolves_to_its_model(tmp_path):
    set_alias("mine", "org/repo@v1:Q8_0")
    set_alias("boxed", "demo")
    set_alias("local", str(tmp_path / "folder"))
    assert parse_name("mine") == RepoName("org/repo", "v1", "Q8_0")
    assert parse_name("boxed") == catalog()["demo"]
    assert parse_name("local") == tmp_path / "folder"
    assert similar_names("mime") == ["mine"]


def test_an_alias_wins_over_a_path_of_that_name(tmp_path):
    (tmp_path / "mine").mkdir()
    assert is_path("mine")
    set_alias("mine", "org/repo")
    assert not is_path("mine")
    assert is_path("./mine")


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": "b", "a": "c"}', "\0", "[" * 10_000])
def test_a_damaged_file_is_an_error_that_says_what_to_do(home, content):
    home.mkdir()
    aliases_file().write_text(content)
    for use in (read_aliases, lambda: set_alias("a", "b"), lambda: parse_name("demo")):
        with pytest.raises(DamagedModel, match=r"aliases\.json is damaged: .*; correct it, or delete it"):
            use()
    assert aliases_file().read_text() == content


def test_a_dangling_alias_does_not_loop(home):
    home.mkdir()
    aliases_file().write_text('{"a": "b", "b": "a", "c": "../up"}')
    for name in ("a", "c"):
        with pytest.raises(ModelNotFound):
            parse_name(name)


def test_a_home_that_cannot_be_written_is_one_error_message(home):
    home.write_text("a file")
    with pytest.raises(UsageError, match=r"aliases\.json cannot be written"):
        set_alias("a", "demo")
