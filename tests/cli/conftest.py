import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants

from localllm.cli.app import main
from tests.cli import fake_engine
from tests.hub.folders import write_model

LAUNCHER = Path(__file__).with_name("launch.py")


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Hide the models, chats and settings of the developer."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("LOCALLLM_DEVICE", "LOCALLLM_DTYPE", "LOCALLLM_KV_DTYPE", "LOCALLLM_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path):
    """The folder of a model with a chat template."""
    return str(write_model(tmp_path / "tiny"))


@pytest.fixture
def base(tmp_path):
    """The folder of a model without one."""
    return str(write_model(tmp_path / "tiny-base"))


@pytest.fixture
def engine(monkeypatch) -> ModuleType:
    """The fake engine instead of `localllm.llm.loader`; `engine.loaded` records the loaded models and options."""
    monkeypatch.setitem(sys.modules, "localllm.llm.loader", None)  # so that it is taken out again
    return fake_engine.install()


@pytest.fixture
def real(monkeypatch, capsys):
    """Run the program in this process, which has already loaded torch. Takes arguments and piped input; returns
    exit code, stdout and stderr.
    """

    def run(*arguments, piped=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class Screen(io.StringIO):
    """A terminal that records its output."""

    def isatty(self) -> bool:
        return True

    def frames(self) -> list[str]:
        """What it has shown between erased lines, without escape sequences."""
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", part) for part in self.getvalue().split("\x1b[2K")]


@pytest.fixture
def screen(monkeypatch) -> Screen:
    """A terminal of 80 columns for `redirect_stderr`."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Screen()


@pytest.fixture
def localllm(engine, real):
    """Run the program in this process with the fake engine."""
    return real


@pytest.fixture
def program():
    """Run the program with the fake engine in its own process."""

    def run(*arguments, **options):
        options = {"input": b"", "capture_output": True} | options
        return subprocess.run([sys.executable, LAUNCHER, *arguments], timeout=200, **options)

    return run
