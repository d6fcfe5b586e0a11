"""`localllm serve --install` and `--uninstall`: the systemd unit and the launchd agent."""

import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli import background
from localllm.cli.app import main


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(background.sys, "platform", "linux")
    return tmp_path / "config"


@pytest.fixture
def unit(config):
    return config / "systemd" / "user" / "localllm.service"


def test_the_unit_has_the_flags_beside_it(config, unit, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALLLM_DEVICE", "cpu")
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret-secret-secret")
    flags = ["--keep-alive=-1", "--port", "8080", "--api-key-file", "a b%$h", "--host-name", "x.org", "--strict"]
    assert main(["serve", "demo", "--install", *flags]) == 0
    out, err = capsys.readouterr()
    text = unit.read_text()
    assert out == text and "secret-secret" not in text and "LOCALLLM_API_KEY is a secret" in err
    assert f"wrote {unit}; start it with: systemctl --user daemon-reload && systemctl --user enable" in err
    [command] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(command.removeprefix("ExecStart="))
    key_file = str(tmp_path / "a b%%$$h")
    assert words == [
        *(sys.executable, "-P", "-m", "localllm", "serve", "--port=8080", f"--api-key-file={key_file}"),
        *("--host-name=x.org", "--keep-alive=-1", "--strict", "demo"),
    ]
    assert "Type=exec\n" in text and "Restart=on-failure\n" in text and "Environment=LOCALLLM_DEVICE=cpu\n" in text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed here")
def test_systemd_accepts_the_unit(unit, capsys):
    assert main(["serve", "demo", "--install", "--origin", "https://a.example", "--exit-when-idle", "1h"]) == 0
    # Not --user, which needs a session of systemd. A test of the test: it complains of a wrong value.
    command = ["systemd-analyze", "verify", str(unit)]
    text = unit.read_text()
    done = subprocess.run(command, capture_output=True, text=True)
    assert "localllm.service" not in done.stderr
    unit.write_text(text.replace("Type=exec", "Type=what"))
    assert "localllm.service" in subprocess.run(command, capture_output=True, text=True).stderr


def test_a_dry_run_writes_nothing(unit, capsys):
    assert main(["serve", "--install", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("[Unit]\n") and not unit.exists()


def test_uninstall_deletes_the_unit_and_its_link(unit, capsys):
    assert main(["serve", "--uninstall"]) == 2
    assert main(["serve", "--install"]) == 0
    link = unit.parent / "default.target.wants" / "localllm.service"
    link.parent.mkdir()
    link.symlink_to(unit)
    assert main(["serve", "--uninstall"]) == 0
    assert not unit.exists() and not link.is_symlink()
    assert "systemctl --user stop localllm" in capsys.readouterr().err


def test_the_agent_is_a_valid_property_list(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(background.sys, "platform", "darwin")
    assert main(["serve", "demo & co", "--install", "--port", "8080"]) == 0
    path = Path(tmp_path / "Library" / "LaunchAgents" / "localllm.plist")
    agent = plistlib.loads(path.read_bytes())
    assert agent["Label"] == "localllm" and agent["RunAtLoad"] is True
    assert agent["ProgramArguments"][-3:] == ["serve", "--port=8080", "demo & co"]
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["EnvironmentVariables"]["LOCALLLM_HOME"] == str(tmp_path / "home")
    assert "launchctl bootstrap gui/" in capsys.readouterr().err
    assert main(["serve", "--uninstall"]) == 0 and not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--install", "--host", "0.0.0.0", "--insecure"], "for this machine only"),
        (["--install", "--api-key", "k" * 16], "plain text"),
        (["--install", "--background"], "exclude each other"),
        (["--background", "--stop"], "exclude each other"),
        (["--dry-run"], "add --install"),
        (["--install", "a\nb"], "control character"),
        (["--exit-when-idle", "never"], "--exit-when-idle is 'never'"),
    ],
)
def test_flags_that_do_not_go_together(unit, capsys, words, message):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err and not unit.exists()
