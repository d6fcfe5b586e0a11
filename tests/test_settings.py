from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.settings import Settings


def test_nothing_set() -> None:
    settings = Settings.from_environment({})
    assert settings == Settings(Path.home() / ".localllm", "auto", "auto", None)


def test_everything_set() -> None:
    names = {"HOME": "/tmp/x", "DEVICE": "cpu", "DTYPE": "float32", "THREADS": "3", "KV_DTYPE": "int8"}
    names |= {"ACTIVATIONS": "8"}
    told = {f"LOCALLLM_{name}": value for name, value in names.items()} | {"XDG_CACHE_HOME": "/tmp/cache"}
    assert Settings.from_environment(told) == Settings(
        Path("/tmp/x"), "cpu", "float32", 3, "int8", "8", Path("/tmp/cache/localllm")
    )


@pytest.mark.parametrize("threads", ["0", "-1", "many", ""])
def test_threads_must_be_a_positive_number(threads: str) -> None:
    with pytest.raises(UsageError, match="LOCALLLM_THREADS"):
        Settings.from_environment({"LOCALLLM_THREADS": threads})


def test_deterministic_is_on_or_off() -> None:
    assert not Settings.from_environment({}).deterministic
    assert Settings.from_environment({"LOCALLLM_DETERMINISTIC": "on"}).deterministic
    with pytest.raises(UsageError, match="LOCALLLM_DETERMINISTIC is 'yes'; set it to on or off"):
        Settings.from_environment({"LOCALLLM_DETERMINISTIC": "yes"})


def test_graphs_are_on_or_off() -> None:
    assert Settings.from_environment({}).graphs and Settings.from_environment({"LOCALLLM_GRAPHS": "on"}).graphs
    assert not Settings.from_environment({"LOCALLLM_GRAPHS": "off"}).graphs
    with pytest.raises(UsageError, match="set it to on or off"):
        Settings.from_environment({"LOCALLLM_GRAPHS": "maybe"})


def test_early_starts_of_kernels_are_on_or_off() -> None:
    assert Settings.from_environment({}).pdl
    assert not Settings.from_environment({"LOCALLLM_PDL": "off"}).pdl
    with pytest.raises(UsageError, match="LOCALLLM_PDL is 'no'; set it to on or off"):
        Settings.from_environment({"LOCALLLM_PDL": "no"})


def test_layouts_are_kept_on_request() -> None:
    assert not Settings.from_environment({}).keep_layout
    assert Settings.from_environment({"LOCALLLM_KEEP_LAYOUT": "on"}).keep_layout
    with pytest.raises(UsageError, match="LOCALLLM_KEEP_LAYOUT is 'yes'; set it to on or off"):
        Settings.from_environment({"LOCALLLM_KEEP_LAYOUT": "yes"})


def test_guessing_is_on_unless_it_is_off():
    assert Settings.from_environment({}).draft == "lookup"
    assert Settings.from_environment({"LOCALLLM_DRAFT": "off"}).draft == "off"
    with pytest.raises(UsageError, match="lookup or off"):
        Settings.from_environment({"LOCALLLM_DRAFT": "maybe"})
