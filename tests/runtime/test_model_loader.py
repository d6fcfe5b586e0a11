"""The cache folder of compiled GPU kernels."""

from pathlib import Path

import pytest
import triton.knobs

from localllm.runtime.model_loader import set_triton_cache_dir


def test_compiled_kernels_are_in_the_users_cache_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    set_triton_cache_dir(tmp_path)
    assert triton.knobs.cache.dir == str(tmp_path / "own")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    set_triton_cache_dir(tmp_path)
    assert triton.knobs.cache.dir == str(tmp_path / "triton")
