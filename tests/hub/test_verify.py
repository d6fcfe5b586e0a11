"""Every file of a cache filled by `huggingface_hub` is damaged in turn, detected and repaired."""

import json
import os
import random
from functools import partial

import pytest
from huggingface_hub import constants

from localllm.errors import ModelNotFound, NetworkError
from localllm.hub.names import RepoName
from localllm.hub.partial_file import PARTIAL_SUFFIX
from localllm.hub.pull import plan_pull, pull
from localllm.hub.remove import plan_removal
from localllm.hub.resolve import resolve_model
from localllm.hub.verify import FileState, file_states, find_snapshots, hash_all, known_digests, repair
from tests.hub import faults
from tests.hub.downloaded import download
from tests.hub.models import Watcher, model_files, weights

FILES = model_files(**{"tokenizer_config.json": b'{"a": 1}'})  # no two are the same
TINY = RepoName("org/tiny")
GGUF = {f"tiny-{quant}.gguf": b"GGUF" + weights(seed=i) for i, quant in enumerate(["Q4_K_M", "Q8_0"])}
PARTS = {f"BF16/tiny-BF16-0000{i}-of-00003.gguf": b"GGUF" + weights(seed=10 + i) for i in (1, 2, 3)}


@pytest.fixture
def fill(hub, cache):
    return partial(download, hub)


@pytest.fixture
def tiny(fill):
    """Folder of a model in the cache."""
    return fill("org/tiny", FILES)


def look(repo=None):
    """States of all files that are not good, by repository and path."""
    found = find_snapshots(repo)
    good = hash_all({path: digest for one in found for path, digest in known_digests(one).items()})
    every = {(str(one.repo), path): state for one in found for path, state in file_states(one, good).items()}
    return {key: state for key, state in every.items() if state is not FileState.GOOD}


def mend(repo):
    [found] = find_snapshots(repo)
    repair(found, file_states(found, hash_all(known_digests(found))), Watcher())


def damage(file, at=0):
    """Flip one bit of the blob that a link points to."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.resolve().write_bytes(content)


def test_intact_files_verify(tiny):
    assert look(TINY) == look() == {}
    [found] = find_snapshots(TINY)
    assert file_states(found, hash_all(known_digests(found))) == dict.fromkeys(FILES, FileState.GOOD)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_in_any_file_is_detected_and_repaired(tiny, name):
    at = random.Random(name).randrange(len(FILES[name]))
    damage(tiny / name, at)
    assert look(TINY) == look() == {("org/tiny", name): FileState.DAMAGED}
    mend(TINY)
    assert look(TINY) == {}
    assert (tiny / name).read_bytes() == FILES[name]


@pytest.mark.parametrize("content", [b"", FILES["model.safetensors"][:-1], FILES["model.safetensors"] + b"\0"])
def test_a_file_of_another_length_is_damaged(tiny, content):
    (tiny / "model.safetensors").resolve().write_bytes(content)
    assert look(TINY) == {("org/tiny", "model.safetensors"): FileState.DAMAGED}
    mend(TINY)
    assert (tiny / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_link_without_its_blob_is_missing(tiny):
    (tiny / "model.safetensors").resolve().unlink()
    (tiny / "onnx/model.onnx").resolve().unlink()
    missing = {("org/tiny", path): FileState.MISSING for path in ("model.safetensors", "onnx/model.onnx")}
    assert look(TINY) == look() == missing
    mend(TINY)
    assert look(TINY) == {}


def test_a_repaired_index_reveals_other_missing_files(fill):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {name: body for name, body in FILES.items() if name != "model.safetensors"} | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": weights(seed=1),
        "model-2.safetensors": weights(seed=2),
    }
    folder = fill("org/tiny", files)
    (folder / "model-2.safetensors").unlink()
    damage(folder / "model.safetensors.index.json")
    assert look(TINY) == {("org/tiny", "model.safetensors.index.json"): FileState.DAMAGED}
    mend(TINY)
    assert look(TINY) == {}
    assert (resolve_model("org/tiny").path / "model-2.safetensors").read_bytes() == files["model-2.safetensors"]


def test_parts_of_a_gguf_model_that_are_missing_come_one_after_the_other(fill):
    fill("org/tiny-GGUF", GGUF | PARTS, allow_patterns=["*Q8_0*", "*00001-of*"])
    missing = {("org/tiny-GGUF", "BF16/tiny-BF16-00002-of-00003.gguf"): FileState.MISSING}
    assert look(RepoName("org/tiny-GGUF")) == look() == missing
    assert look(RepoName("org/tiny-GGUF", quant="Q8_0")) == {}
    mend(RepoName("org/tiny-GGUF", quant="BF16"))
    assert look() == {}
    assert len(resolve_model("org/tiny-GGUF:BF16").path.read_bytes()) == len(
        PARTS["BF16/tiny-BF16-00001-of-00003.gguf"]
    )
    with pytest.raises(ModelNotFound):
        find_snapshots(RepoName("org/tiny-GGUF", quant="Q4_K_M"))


def test_verifying_a_gguf_model_checks_its_own_files(fill):
    folder = fill("org/tiny-GGUF", GGUF)
    damage(folder / "tiny-Q4_K_M.gguf", 100)
    assert look(RepoName("org/tiny-GGUF", quant="Q8_0")) == {}
    assert look(RepoName("org/tiny-GGUF", quant="Q4_K_M")) == {
        ("org/tiny-GGUF:Q4_K_M", "tiny-Q4_K_M.gguf"): FileState.DAMAGED
    }
    mend(RepoName("org/tiny-GGUF"))
    assert look() == {}


def test_a_download_that_was_interrupted_is_completed(fill, cache):
    fill("org/tiny", FILES, allow_patterns=["config.json"])
    missing = {("org/tiny", path): FileState.MISSING for path in ("tokenizer.json", "model.safetensors")}
    assert look(TINY) == missing
    assert look() == {}, "a program may have wanted no more than this file"
    (cache / "models--org--tiny" / "blobs" / ("a" * 64 + PARTIAL_SUFFIX)).touch()
    assert look() == missing
    mend(TINY)
    assert look(TINY) == {}


def test_a_tokenizer_of_another_name_is_found_by_the_hubs_list(fill):
    files = {name: body for name, body in FILES.items() if name != "tokenizer.json"} | {"tokenizer.model": b"spm"}
    fill("org/tiny", files, allow_patterns=["config.json", "model.safetensors"])
    assert look(TINY) == {("org/tiny", "tokenizer.json"): FileState.MISSING}
    mend(TINY)
    assert look(TINY) == {}


def test_the_local_commit_is_repaired_after_the_branch_moved(tiny, hub):
    hub.add("org/tiny", model_files(**{"model.safetensors": weights(seed=9)}))
    damage(tiny / "model.safetensors")
    mend(TINY)
    assert resolve_model("org/tiny").path == tiny
    assert (tiny / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize("trouble", ["offline", "hub gone", "not listed"])
def test_without_the_hub_a_damaged_file_stays_where_it_is(tiny, hub, monkeypatch, trouble):
    damage(tiny / "model.safetensors")
    if trouble == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif trouble == "hub gone":
        hub.disturb(faults.refused(503), "/api/", times=None)
    if trouble == "not listed":
        del hub.repositories["org/tiny"].commits[tiny.name]["model.safetensors"]
        mend(TINY)
    else:
        with pytest.raises(NetworkError):
            mend(TINY)
    assert look(TINY) == {("org/tiny", "model.safetensors"): FileState.DAMAGED}
    assert (tiny / "model.safetensors").exists()


def test_an_interrupted_repair_resumes(tiny, hub):
    damage(tiny / "model.safetensors")
    hub.disturb(faults.refused(404, "EntryNotFound"), "model.safetensors", method=None, times=None)
    with pytest.raises(ModelNotFound):
        mend(TINY)
    assert look(TINY) == {("org/tiny", "model.safetensors"): FileState.MISSING}
    hub.faults.clear()
    mend(TINY)
    assert look(TINY) == {}


def test_files_without_a_digest_are_left_alone(tiny, hub):
    (tiny / "config.json").unlink()
    (tiny / "config.json").write_bytes(FILES["config.json"])
    os.symlink("/etc/hostname", tiny / "elsewhere")
    assert look(TINY) == {("org/tiny", path): FileState.UNKNOWN for path in ("config.json", "elsewhere")}


def test_files_without_links_are_checked_against_recorded_digests(hub, cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    monkeypatch.setattr("huggingface_hub.file_download._are_symlinks_supported_in_dir", {})
    hub.add("org/tiny", FILES)
    folder = pull(plan_pull(TINY, print), Watcher())
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert look(TINY) == {}
    damage(folder / "model.safetensors", at=9)
    assert look(TINY) == {("org/tiny", "model.safetensors"): FileState.DAMAGED}
    mend(TINY)
    assert look(TINY) == {}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    (cache / "models--org--tiny" / "digests" / f"{folder.name}.json").write_text(
        '{"config.json": "../../x", "a": 3}'
    )
    assert set(look(TINY).values()) == {FileState.UNKNOWN}
    plan_removal(TINY).strategy.execute()
    assert not list(cache.rglob("*.json"))


def test_all_revisions_of_all_models_are_checked(tiny, hub, fill):
    fill("org/tiny", FILES | {"config.json": b'{"new": 1}'})
    fill("an/encoder", {"pytorch_model.bin": b"pickles", "config.json": b"{}"})
    damage(tiny / "config.json")
    assert look() == {(f"org/tiny@{tiny.name}", "config.json"): FileState.DAMAGED}
    assert {str(found.repo) for found in find_snapshots(None)} == {
        "an/encoder",
        "org/tiny",
        f"org/tiny@{tiny.name}",
    }


def test_progress_is_reported_while_reading(tiny):
    [found] = find_snapshots(TINY)
    told = []
    hash_all(known_digests(found), told.append)
    assert sum(told) == sum(map(len, FILES.values()))


def test_a_missing_model_is_reported(cache):
    with pytest.raises(ModelNotFound, match="org/tiny is not on this machine; run `localllm pull org/tiny`"):
        find_snapshots(TINY)
    assert find_snapshots(None) == []
