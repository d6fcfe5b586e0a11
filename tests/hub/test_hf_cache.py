import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from localllm.hub.hf_cache import cache_state, is_writable
from localllm.hub.partial_file import PARTIAL_SUFFIX
from tests.hub.folders import write_cached


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "new" / "hub"))
    return tmp_path / "new" / "hub"


def test_a_cache_that_does_not_exist_yet(cache: Path) -> None:
    state = cache_state({})
    assert (state.path, state.because, state.exists, state.writable) == (cache, "default", False, True)
    assert (state.models, state.model_bytes, state.unfinished) == (0, 0, 0)
    assert state.free_bytes > 0


@pytest.mark.parametrize(
    ("variables", "because"),
    [
        ({"HF_HOME": "/a", "HF_HUB_CACHE": "/b"}, "HF_HUB_CACHE"),
        ({"XDG_CACHE_HOME": "/c", "HF_HOME": "/a"}, "HF_HOME"),
        ({"XDG_CACHE_HOME": "/c"}, "XDG_CACHE_HOME"),
        ({"HF_HOME": ""}, "default"),
    ],
)
def test_the_location_of_the_cache_is_explained(cache: Path, variables: dict[str, str], because: str) -> None:
    assert cache_state(variables).because == because


def test_contents_of_the_cache(cache: Path) -> None:
    folders = [write_cached(cache, "a/model"), write_cached(cache, "b/model")]
    blobs = cache / "models--a--model" / "blobs"
    for file in list(folders[0].iterdir()):  # as it is on most systems: links to what lies in blobs
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    (cache / "datasets--a--set").mkdir()
    (cache / "datasets--a--set" / "rows").write_bytes(b"1" * 1000)
    for name in (f"one{PARTIAL_SUFFIX}", "two.incomplete"):
        with (blobs / name).open("wb") as file:
            file.write(b"1" * 8192)
            file.truncate(10_000_000)  # the rest is a hole
    state = cache_state({})
    files = [file for folder in folders for file in folder.iterdir()]
    refs = [file for file in cache.glob("models--*/refs/main")]
    assert (state.exists, state.models, state.unfinished) == (True, 2, 2)
    assert state.model_bytes == sum(file.stat().st_size for file in [*files, *refs])
    assert 16_384 <= state.unfinished_bytes < 1_000_000


def test_writable_folders(tmp_path: Path) -> None:
    assert is_writable(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file" / "folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="rights do not bind root")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert not is_writable(tmp_path / "new")
