import hashlib
import shutil
from pathlib import Path

import pytest

from localllm.checkpoint import digest
from localllm.checkpoint.digest import FileDigest, combine_digests, digest_model
from tests.hub.folders import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def large(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose weights are too large to be hashed completely: 300 KB, with a limit of 100 KB."""
    monkeypatch.setattr(digest, "SMALL_FILE_BYTES", 100_000)
    monkeypatch.setattr(digest, "HEAD_BYTES", 5_000)
    (model / "model.safetensors").write_bytes(bytes(range(250)) * 1200)
    return model


def of_weights(model: Path) -> FileDigest:
    [found] = [file for file in digest_model(model) if file.path == "model.safetensors"]
    return found


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_exactly_the_files_that_determine_an_answer_are_hashed(model: Path) -> None:
    (model / "README.md").write_text("not read")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    found = {file.path: file for file in digest_model(model)}
    assert set(found) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors",
    }
    assert {path for path, file in found.items() if file.affects_logits} == {"config.json", "model.safetensors"}
    for path, file in found.items():
        content = (model / path).read_bytes()
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert file.samples is None


def test_all_parts_of_a_gguf_model_are_hashed(tmp_path: Path) -> None:
    names = [f"tiny-0000{part}-of-00002.gguf" for part in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF" + name.encode())
    assert [file.path for file in digest_model(tmp_path / names[0])] == names


def test_one_changed_bit_of_a_small_file_changes_the_digest(model: Path) -> None:
    before = digest_model(model)
    flip(model / "model.safetensors", -1)
    [(old, new)] = [(a, b) for a, b in zip(before, digest_model(model), strict=True) if not a.matches(b)]
    assert old.path == new.path == "model.safetensors"
    assert combine_digests(before) != combine_digests(digest_model(model))


@pytest.mark.parametrize("at", [0, 4_999, 295_904, 299_999], ids=["first", "begin", "slice", "last"])
def test_samples_of_a_large_file_are_compared(large: Path, at: int) -> None:
    before = of_weights(large)
    assert (before.sha256, before.matches(of_weights(large))) == (None, True)
    flip(large / "model.safetensors", at)
    assert not before.matches(of_weights(large))


def test_a_truncated_or_overwritten_large_file_changes_the_digest(large: Path) -> None:
    before, file = of_weights(large), large / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert not before.matches(of_weights(large))
    file.write_bytes(content[::-1])
    assert not before.matches(of_weights(large))


def test_the_hubs_hash_is_read_from_the_blob_name(large: Path, tmp_path: Path) -> None:
    weights = large / "model.safetensors"
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    blob = tmp_path / "blobs" / sha256
    blob.parent.mkdir()
    shutil.move(weights, blob)
    by_itself = tmp_path / "copy"
    shutil.copytree(large, by_itself)
    shutil.copy(blob, by_itself / "model.safetensors")
    weights.symlink_to(blob)
    here, there = of_weights(large), of_weights(by_itself)
    assert (here.sha256, there.sha256) == (sha256, None)
    assert here.matches(there)  # by what is known of both
    assert combine_digests(digest_model(large))[1] == "sha256"
    assert combine_digests(digest_model(by_itself))[1] == "samples"


def test_files_without_a_common_hash_are_not_considered_equal() -> None:
    assert not FileDigest("a", 5, "x", None).matches(FileDigest("a", 5, None, "y"))
