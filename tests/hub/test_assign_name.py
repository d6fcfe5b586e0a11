"""Created editions and uploaded files on disk."""

import hashlib
import json

import pytest

from localllm.errors import DamagedModel, DiskFull, ModelNotFound, UsageError, WrongDigest
from localllm.hub.assign_name import assign_edition, copy_name, remove_name
from localllm.hub.local_names import edition_files, find_edition
from localllm.hub.names import parse_name, strip_latest
from localllm.hub.resolve import installed_models, resolve_model
from localllm.hub.uploaded_blobs import BlobUpload, blob_file, link_model_folder
from localllm.modelfile.edition import Edition


def send(content):
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with BlobUpload(digest) as incoming:
        incoming.write(content)
        incoming.finish()
    return digest


def test_the_tag_latest_is_ignored_unless_it_exists():
    assert parse_name("demo:latest") == parse_name("demo")
    assert resolve_model("demo:latest") == resolve_model("demo")
    assert str(parse_name("org/repo:latest")) == "org/repo"
    assert strip_latest("qwen3:0.6b") == "qwen3:0.6b"
    copy_name("mine:latest", "demo")
    assert resolve_model("mine").path == resolve_model("mine:latest").path == resolve_model("demo").path


def test_an_edition_stands_for_its_model(home):
    assign_edition("cat:v1", Edition("demo", system="meow"))
    assert resolve_model("cat:v1").path == resolve_model("demo").path
    assert [file.name for file in (home / "made").iterdir()] == ["cat+v1.json"]
    assert "cat:v1" in {ref.name for ref in installed_models()}
    assert remove_name("cat:v1") == "demo" and remove_name("cat:v1") is None
    with pytest.raises(ModelNotFound):
        resolve_model("cat:v1")


def test_a_name_stands_for_one_thing(home):
    copy_name("x", "demo")
    assign_edition("x", Edition("demo", system="a"))
    assert find_edition("x") and not json.loads((home / "aliases.json").read_text())
    copy_name("x", "demo")
    assert not find_edition("x")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"source": 3}', '{"source": "a", "system": 1}', '{"x": 1}'])
def test_a_damaged_file_is_reported_with_its_name(home, content):
    assign_edition("cat", Edition("demo"))
    (home / "made" / "cat.json").write_text(content)
    with pytest.raises(DamagedModel, match=r"cat\.json"):
        find_edition("cat")


def test_foreign_files_are_no_editions(home):
    assign_edition("cat", Edition("demo"))
    (home / "made" / ".tmp.json").write_text("{}")
    assert list(edition_files()) == ["cat"]


def test_blobs_are_stored_once_and_removed_with_their_last_user(home):
    first, second = send(b"GGUF one"), send(b"GGUF two")
    both = link_model_folder({"a.gguf": first, "b.gguf": second})
    one = link_model_folder({"c.gguf": first})
    assert (both / "a.gguf").samefile(one / "c.gguf")
    assert link_model_folder({"b.gguf": second, "a.gguf": first}) == both
    assign_edition("x", Edition(str(both / "a.gguf")))
    assign_edition("y", Edition(str(one / "c.gguf")))
    assign_edition("z", Edition(str(both / "b.gguf")))
    remove_name("x")
    assert both.exists(), "z is made of it"
    remove_name("z")
    assert not both.exists() and not blob_file(second).exists() and blob_file(first).exists()
    assign_edition("y", Edition("demo"))
    assert not one.exists() and not blob_file(first).exists()


def test_an_incomplete_upload_leaves_nothing(home):
    digest = f"sha256:{'0' * 64}"
    with pytest.raises(WrongDigest, match="digest mismatch"), BlobUpload(digest) as incoming:
        incoming.write(b"x")
        incoming.finish()
    with BlobUpload(digest) as incoming:
        incoming.write(b"x")
    assert not list((home / "blobs").iterdir())


def test_uploads_beyond_the_free_space_are_refused_first(home):
    with pytest.raises(DiskFull):
        BlobUpload(f"sha256:{'0' * 64}", 10**18)
    assert not home.exists()


@pytest.mark.parametrize("digest", ["", "sha256:x", "sha256:" + "A" * 64, "../x", "sha256:" + "0" * 63 + "/"])
def test_an_invalid_digest_is_no_path(digest):
    with pytest.raises(UsageError, match="invalid digest format"):
        blob_file(digest)


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "a\0", "a" * 300])
def test_an_invalid_file_name_is_no_path(home, name):
    digest = send(b"x")
    with pytest.raises(UsageError, match="not a valid file name"):
        link_model_folder({name: digest})
    assert not (home / "models").exists()
