"""Editions and the files that were sent for them, on the disk."""

import hashlib
import json

import pytest

from localllm.errors import DamagedModel, DiskFull, ModelNotFound, UsageError
from localllm.hub.blobs import Incoming, WrongDigest, blob_file, folder_of
from localllm.hub.installed import installed
from localllm.hub.made import edition_of, made_files
from localllm.hub.names import known_as, parse
from localllm.hub.naming import give, make, take
from localllm.hub.resolve import resolve
from localllm.modelfile.edition import Edition


def send(content):
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with Incoming(digest) as incoming:
        incoming.write(content)
        incoming.finish()
    return digest


def test_latest_says_nothing_unless_a_name_has_it():
    assert parse("demo:latest") == parse("demo")
    assert resolve("demo:latest") == resolve("demo")
    assert str(parse("org/repo:latest")) == "org/repo"
    assert known_as("qwen3:0.6b") == "qwen3:0.6b"
    give("mine:latest", "demo")
    assert resolve("mine").path == resolve("mine:latest").path == resolve("demo").path


def test_an_edition_stands_for_its_model(home):
    make("cat:v1", Edition("demo", system="meow"))
    assert resolve("cat:v1").path == resolve("demo").path
    assert [file.name for file in (home / "made").iterdir()] == ["cat+v1.json"]
    assert "cat:v1" in {ref.name for ref in installed()}
    assert take("cat:v1") == "demo" and take("cat:v1") is None
    with pytest.raises(ModelNotFound):
        resolve("cat:v1")


def test_a_name_stands_for_one_thing(home):
    give("x", "demo")
    make("x", Edition("demo", system="a"))
    assert edition_of("x") and not json.loads((home / "aliases.json").read_text())
    give("x", "demo")
    assert not edition_of("x")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"source": 3}', '{"source": "a", "system": 1}', '{"x": 1}'])
def test_a_damaged_file_is_told_with_its_name(home, content):
    make("cat", Edition("demo"))
    (home / "made" / "cat.json").write_text(content)
    with pytest.raises(DamagedModel, match=r"cat\.json"):
        edition_of("cat")


def test_files_that_strangers_put_there_are_no_editions(home):
    make("cat", Edition("demo"))
    (home / "made" / ".tmp.json").write_text("{}")
    assert list(made_files()) == ["cat"]


def test_contents_are_kept_once_and_go_with_the_last_that_uses_them(home):
    first, second = send(b"GGUF one"), send(b"GGUF two")
    both = folder_of({"a.gguf": first, "b.gguf": second})
    one = folder_of({"c.gguf": first})
    assert (both / "a.gguf").samefile(one / "c.gguf")
    assert folder_of({"b.gguf": second, "a.gguf": first}) == both
    make("x", Edition(str(both / "a.gguf")))
    make("y", Edition(str(one / "c.gguf")))
    make("z", Edition(str(both / "b.gguf")))
    take("x")
    assert both.exists(), "z is made of it"
    take("z")
    assert not both.exists() and not blob_file(second).exists() and blob_file(first).exists()
    make("y", Edition("demo"))
    assert not one.exists() and not blob_file(first).exists()


def test_a_content_that_is_not_whole_leaves_nothing(home):
    digest = f"sha256:{'0' * 64}"
    with pytest.raises(WrongDigest, match="digest mismatch"), Incoming(digest) as incoming:
        incoming.write(b"x")
        incoming.finish()
    with Incoming(digest) as incoming:
        incoming.write(b"x")
    assert not list((home / "blobs").iterdir())


def test_what_the_disk_cannot_hold_is_refused_before_it_comes(home):
    with pytest.raises(DiskFull):
        Incoming(f"sha256:{'0' * 64}", 10**18)
    assert not home.exists()


@pytest.mark.parametrize("digest", ["", "sha256:x", "sha256:" + "A" * 64, "../x", "sha256:" + "0" * 63 + "/"])
def test_what_is_no_digest_is_no_path(digest):
    with pytest.raises(UsageError, match="invalid digest format"):
        blob_file(digest)


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "a\0", "a" * 300])
def test_what_is_no_name_of_a_file_is_no_path(home, name):
    digest = send(b"x")
    with pytest.raises(UsageError, match="no name of a file"):
        folder_of({name: digest})
    assert not (home / "models").exists()
