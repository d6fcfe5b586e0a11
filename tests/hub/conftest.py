import pytest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """No names that the person who runs the tests has given."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
