import pytest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Hide the developer's aliases."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
