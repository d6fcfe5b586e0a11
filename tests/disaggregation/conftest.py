"""The model of the tests of prompts apart from answers."""

from pathlib import Path

import pytest

from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = FAMILIES["Qwen3"]
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, kind, **changes)
    return folder
