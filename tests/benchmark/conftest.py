import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.hardware import measure
from localllm.hub.catalog import bundled_folder, catalog
from localllm.settings import Settings
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint

DEMO = bundled_folder(catalog()["demo"])
assert DEMO


@pytest.fixture(scope="package", autouse=True)
def small_ceilings() -> Iterator[None]:
    """Measure ceilings with small matrices, since their values do not matter in these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "COLUMNS", 128)
        patch.setattr(measure, "MATRIX_ROWS", {"cpu": 64})
        patch.setattr(measure, "BUFFER_BYTES", {"cpu": 2**22})
        patch.setattr(measure, "MAX_DURATION_S", 0.01)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(tmp_path_factory.mktemp("home"), "cpu", "float32", threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a tiny model of a family of `tests/models/families.py` with the demo's tokenizer."""

    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp("model") / "tiny"
        kind, changes = FAMILIES[family]
        make_checkpoint(folder, kind, vocab_size=3072, **changes)
        shutil.copy(DEMO / "tokenizer.json", folder)
        return folder

    return write
