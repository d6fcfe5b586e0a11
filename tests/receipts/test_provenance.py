from pathlib import Path

import pytest

from localllm.hub.hf_cache import cache_root, parse_snapshot_path
from localllm.hub.resolve import resolve_model
from localllm.receipts.provenance import source_name
from tests.hub.folders import SNAPSHOT, write_cached, write_model


def test_a_model_of_the_hub_is_named_by_its_commit_and_found_again(cache: Path) -> None:
    folder = write_cached(cache, "org/tiny-model")
    assert source_name(folder) == f"org/tiny-model@{SNAPSHOT}"
    assert source_name(resolve_model("org/tiny-model").path) == f"org/tiny-model@{SNAPSHOT}"
    assert resolve_model(f"org/tiny-model@{SNAPSHOT}").path == folder


@pytest.mark.parametrize("file", ["tiny-Q8_0.gguf", "BF16/tiny-BF16.gguf"])
def test_so_is_a_gguf_file_of_a_repository_of_several(cache: Path, file: str) -> None:
    snapshot = cache / "models--org--tiny" / "snapshots" / SNAPSHOT
    for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf", "BF16/tiny-BF16.gguf"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(b"GGUF")
    assert source_name(snapshot / file) == f"org/tiny@{SNAPSHOT}:{file}"
    assert resolve_model(f"org/tiny@{SNAPSHOT}:{file}").path == snapshot / file


def test_the_bundled_model_has_a_name_and_other_folders_their_path(tmp_path: Path, cache: Path) -> None:
    assert source_name(resolve_model("demo").path) == "demo"
    folder = write_model(tmp_path / "tiny")
    assert source_name(folder) == str(folder)


@pytest.mark.parametrize("inner", ["models--org--tiny", "models--org--tiny/blobs/x", "datasets--a--b/snapshots/c"])
def test_other_folders_in_the_cache_are_no_snapshots(cache: Path, inner: str) -> None:
    assert parse_snapshot_path(cache_root() / inner) is None
