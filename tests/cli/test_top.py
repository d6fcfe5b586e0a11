"""`localllm top` without a terminal: one snapshot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import localllm
from tests.server.conftest import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url():
    with localllm.load("demo") as llm, serving(llm) as url:
        yield url


def top(home, *words):
    command = [sys.executable, "-m", "localllm", "top", "--every", "0.2s", *words]
    environment = os.environ | {"LOCALLLM_HOME": str(home)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=200)


def test_one_snapshot_as_text(url, tmp_path):
    done = top(tmp_path, "--server", url)
    assert (done.returncode, done.stderr) == (0, "")
    head, about, *_ = done.stdout.split("\n\n")
    assert head.startswith("localllm ") and url in head
    assert about.startswith("demo  cpu ") and "no requests" in about and "decode  0 tokens/s" in about


def test_one_snapshot_as_json(url, tmp_path):
    done = top(tmp_path, "--server", url, "--json")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert [model["name"] for model in found["models"]] == ["demo"]
    assert found["models"][0]["pace"]["output_per_s"] == 0


def test_a_missing_server_is_reported(tmp_path):
    done = top(tmp_path, "--server", "127.0.0.1:9")
    assert done.returncode == 7 and "cannot reach a localllm server" in done.stderr


def test_a_pace_that_no_server_needs_is_refused(tmp_path):
    done = top(tmp_path, "--every", "0.01s")
    assert done.returncode == 2 and "too short" in done.stderr
