"""`localllm create`, and the commands that use its result."""

import json

import pytest

from localllm.hub.catalog import PACKAGE_FOLDER

CAT = "FROM demo\nSYSTEM You are a cat.\nPARAMETER temperature 0\nPARAMETER num_predict 8\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_created_model_is_run_shown_copied_and_removed(tmp_path, real):
    (tmp_path / "Modelfile").write_text(CAT)
    assert real("create", "mycat")[:2] == (0, "mycat\n")
    said = real("run", "mycat", "Hi")[1]
    flags = ("--system", "You are a cat.", "--temperature", "0", "--max-tokens", "8")
    assert said == real("run", "demo", *flags, "Hi")[1] != ""
    assert real("cp", "mycat:latest", "tom")[0] == 0
    assert real("run", "tom", "Hi")[1] == said
    assert {"mycat", "tom"} <= {model["name"] for model in json.loads(real("list", "--json")[1])}
    assert 'FROM demo\nSYSTEM """You are a cat."""\nPARAMETER temperature 0' in real("show", "tom")[1]
    shown = json.loads(real("show", "tom", "--json")[1])
    assert shown["edition"]["system"] == "You are a cat."
    assert shown["sampling"]["temperature"] == 0.0
    assert real("rm", "tom", "mycat:latest")[0] == 0
    assert real("run", "tom", "Hi")[0] == 8


def test_a_path_begins_at_the_folder_of_the_modelfile(tmp_path, real):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "weights").symlink_to(PACKAGE_FOLDER / "boxed" / "demo")
    (tmp_path / "there" / "x").write_text("FROM ./weights\nPARAMETER num_predict 3\n")
    assert real("create", "mine", "-f", "there/x")[0] == 0
    assert real("run", "mine", "Hi")[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "code", "told"),
    [
        ("x", "FROM demo\nADAPTER y\n", 2, "line 2 of the Modelfile: ADAPTER is not supported"),
        ("x", "FROM nothing-like-it\n", 8, "no model is called nothing-like-it"),
        ("x", "FROM demo\nTEMPLATE {% for %}\n", 7, "template is broken"),
        ("demo", "FROM demo\n", 2, "choose another name"),
        ("a/b", "FROM demo\n", 2, "is not a valid name"),
        ("x", None, 2, "cannot be read"),
    ],
)
def test_a_failed_create_leaves_nothing_behind(tmp_path, real, name, text, code, told):
    if text is not None:
        (tmp_path / "Modelfile").write_text(text)
    found, _, err = real("create", name)
    assert found == code and told in err
    assert not (tmp_path / "home").exists()
