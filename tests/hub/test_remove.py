"""Removal from caches that `huggingface_hub` itself has filled."""

import fcntl
import os
from functools import partial

import pytest
from huggingface_hub import scan_cache_dir

from localllm.errors import ModelNotFound, UsageError
from localllm.hub.names import RepoName
from localllm.hub.partial_file import PART_BYTES, PARTIAL_SUFFIX, PartialFile
from localllm.hub.remove import plan_removal
from localllm.hub.resolve import resolve_model
from tests.hub.downloaded import download
from tests.hub.models import model_files, weights

GGUF = {f"tiny-{quant}.gguf": b"GGUF" + weights(seed=i) for i, quant in enumerate(["Q4_K_M", "Q8_0"])}
PARTS = {f"BF16/tiny-BF16-0000{i}-of-00002.gguf": b"GGUF" + weights(seed=10 + i) for i in (1, 2)}


@pytest.fixture
def fill(hub, cache):
    return partial(download, hub)


def used(folder):
    """Bytes of all files below, each counted once."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def remove(repo, revision="main", quant=None):
    return plan_removal(RepoName(repo, revision, quant)).execute()


def test_removing_the_only_revision_removes_everything(fill, cache):
    fill("org/tiny", model_files())
    fill("org/stays", model_files())
    before = used(cache)
    plan = plan_removal(RepoName("org/tiny"))
    assert {file.path for file in plan.files} == model_files().keys()
    assert used(cache) == before  # a plan changes nothing
    freed = plan.execute()
    assert freed == before - used(cache) > len(model_files()["model.safetensors"])
    assert not (cache / "models--org--tiny").exists()
    assert [repo.repo_id for repo in scan_cache_dir(cache).repos] == ["org/stays"]


def test_files_of_other_revisions_stay(fill, cache):
    fill("org/tiny", model_files(), "v1")
    fill("org/tiny", model_files(**{"config.json": b'{"new": 1}'}))
    before = used(cache / "models--org--tiny" / "blobs")
    plan = plan_removal(RepoName("org/tiny"))
    assert [file.path for file in plan.files] == ["config.json"]
    assert {kept.why for kept in plan.kept} == {"revision v1 has it, too"}
    assert {kept.path for kept in plan.kept} == model_files().keys() - {"config.json"}
    assert plan.execute() == len(b'{"new": 1}') == before - used(cache / "models--org--tiny" / "blobs")
    [left] = scan_cache_dir(cache).repos
    assert [revision.refs for revision in left.revisions] == [{"v1"}]
    folder = resolve_model("org/tiny@v1").path
    assert {name: (folder / name).read_bytes() for name in model_files()} == model_files()


def test_a_commit_that_has_two_names_loses_one_of_them(fill, cache):
    commit = fill("org/tiny", model_files(), "v1").name
    fill("org/tiny", model_files())
    plan = plan_removal(RepoName("org/tiny"))
    assert (plan.freed_bytes, plan.files) == (0, ())
    assert {kept.why for kept in plan.kept} == {"v1 is the same revision"}
    plan.execute()
    assert resolve_model("org/tiny@v1").path.name == commit
    with pytest.raises(ModelNotFound):
        resolve_model("org/tiny")
    fill("org/tiny", model_files())
    remove("org/tiny", commit)  # by its hash it goes under all names
    assert not (cache / "models--org--tiny").exists()


def test_removing_the_last_gguf_model_removes_the_rest(fill, cache):
    fill("org/tiny-GGUF", GGUF | PARTS | {"README.md": b"about"})
    with pytest.raises(UsageError, match=r"several models; .* org/tiny-GGUF:BF16, .*:Q4_K_M, .*:Q8_0"):
        plan_removal(RepoName("org/tiny-GGUF"))
    assert remove("org/tiny-GGUF", quant="bf16") == sum(map(len, PARTS.values()))
    snapshot = resolve_model("org/tiny-GGUF:Q8_0").path.parent
    assert {path.name for path in snapshot.iterdir()} == GGUF.keys() | {"README.md"}
    assert remove("org/tiny-GGUF", quant="Q8_0") == len(GGUF["tiny-Q8_0.gguf"])
    with pytest.raises(ModelNotFound, match="has no model Q8_0"):
        plan_removal(RepoName("org/tiny-GGUF", quant="Q8_0"))
    remove("org/tiny-GGUF", quant="Q4_K_M")
    assert not (cache / "models--org--tiny-GGUF").exists()


def test_a_file_with_the_same_content_keeps_it(fill, cache):
    fill("org/tiny-GGUF", GGUF | {"copy.gguf": GGUF["tiny-Q8_0.gguf"]})
    plan = plan_removal(RepoName("org/tiny-GGUF", quant="Q8_0"))
    assert [kept.why for kept in plan.kept] == ["copy.gguf has it, too"]
    assert plan.execute() == 0
    assert resolve_model("org/tiny-GGUF:copy.gguf").path.read_bytes() == GGUF["tiny-Q8_0.gguf"]


def test_one_gguf_model_of_a_commit_with_two_names_must_be_named_by_it(fill):
    commit = fill("org/tiny-GGUF", GGUF, "v1").name
    fill("org/tiny-GGUF", GGUF)
    with pytest.raises(
        UsageError, match=f"main and v1 are the same revision; `localllm rm org/tiny-GGUF@{commit}:Q8_0`"
    ):
        plan_removal(RepoName("org/tiny-GGUF", quant="Q8_0"))
    assert remove("org/tiny-GGUF", commit, "Q8_0") == len(GGUF["tiny-Q8_0.gguf"])


def test_partial_downloads_are_removed_and_holes_not_counted(fill, cache):
    fill("org/tiny", model_files(), "v1")
    fill("org/tiny", model_files(**{"config.json": b"other"}))
    blobs = cache / "models--org--tiny" / "blobs"
    with PartialFile(blobs / ("a" * 64 + PARTIAL_SUFFIX), 10 * PART_BYTES) as begun:
        begun.write(begun.parts[3], b"x" * 50_000)
    (blobs / ("b" * 64 + ".01234567.incomplete")).write_bytes(b"y" * 1000)
    plan = plan_removal(RepoName("org/tiny"))
    assert len(plan.unfinished) == 2
    assert 51_000 <= plan.execute() < PART_BYTES
    assert not [blob for blob in blobs.iterdir() if "." in blob.name]


def test_a_barely_started_download_can_be_removed(cache):
    root = cache / "models--org--tiny"
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    (root / "blobs" / ("a" * 64 + PARTIAL_SUFFIX)).write_bytes(b"x" * 1000)
    assert remove("org/tiny") == 1040
    assert not root.exists()


def test_running_downloads_are_left_alone(fill, cache):
    fill("org/tiny", model_files())
    root = cache / "models--org--tiny"
    (root / "blobs" / ("a" * 64 + PARTIAL_SUFFIX)).write_bytes(b"x")
    lock = cache / ".locks" / root.name / ("a" * 64 + ".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is fetching org/tiny"):
            plan_removal(RepoName("org/tiny"))
    remove("org/tiny")


def test_a_cache_with_links_that_lead_nowhere_can_be_cleaned(fill, cache):
    fill("org/tiny", model_files())
    blobs = cache / "models--org--tiny" / "blobs"
    max(blobs.iterdir(), key=lambda blob: blob.stat().st_size).unlink()
    assert remove("org/tiny") > 0
    assert not blobs.parent.exists()


def test_links_out_of_the_cache_are_not_followed(fill, cache, tmp_path):
    fill("org/tiny", model_files())
    (tmp_path / "mine").write_bytes(b"precious")
    snapshot = resolve_model("org/tiny").path
    os.symlink(tmp_path / "mine", snapshot / "mine")
    os.symlink(tmp_path, snapshot / "folder")
    remove("org/tiny")
    assert (tmp_path / "mine").read_bytes() == b"precious"


def test_contents_that_repositories_share_go_with_the_last_of_them(fill, cache, tmp_path):
    """Simulates `huggingface_hub`'s storage of Xet downloads: blobs are links into a shared store."""
    from huggingface_hub.utils import _shared_blobs

    fill("org/one", model_files())
    fill("org/two", model_files())
    size = len(model_files()["model.safetensors"])
    paths = [cache / f"models--org--{name}" / "blobs" for name in ("one", "two")]
    blobs = [next(blob for blob in folder.iterdir() if blob.stat().st_size == size) for folder in paths]
    for blob in blobs:
        _shared_blobs.publish_blob_to_shared_store(
            blob_path=str(blob), xet_hash="a" * 64, cache_dir=cache, expected_size=size
        )
    assert [blob.is_symlink() for blob in blobs] == [True, True]
    assert remove("org/one") < size
    assert (resolve_model("org/two").path / "model.safetensors").read_bytes() == model_files()["model.safetensors"]
    assert remove("org/two") > size


@pytest.mark.parametrize("revision", ["v9", "0" * 40])
def test_a_missing_model_is_reported(fill, revision):
    with pytest.raises(ModelNotFound, match="org/tiny is not on this machine"):
        plan_removal(RepoName("org/tiny"))
    fill("org/tiny", model_files())
    with pytest.raises(ModelNotFound, match=f"org/tiny@{revision} is not on this machine"):
        plan_removal(RepoName("org/tiny", revision))
