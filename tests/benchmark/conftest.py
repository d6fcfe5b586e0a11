import shutil
from pathlib import Path
from typing import Any

import pytest

from localllm import rates
from localllm.hub.catalog import boxed_folder, catalog
from localllm.settings import Settings
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint

DEMO = boxed_folder(catalog()["demo"])
assert DEMO


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of little matrices: what they are does not matter here."""
    monkeypatch.setattr(rates, "COLUMNS", 128)
    monkeypatch.setattr(rates, "ROWS", {"cpu": 64})
    monkeypatch.setattr(rates, "BUFFER_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(rates, "PATIENCE_S", 0.01)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "home", "cpu", "float32", threads=1)


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """Writes a tiny model of a family of `tests/models/families.py` with the demo's tokenizer."""

    def write(family: str, name: str = "tiny") -> Path:
        kind, changes = FAMILIES[family]
        make_checkpoint(tmp_path / name, kind, vocab_size=3072, **changes)
        shutil.copy(DEMO / "tokenizer.json", tmp_path / name)
        return tmp_path / name

    return write
