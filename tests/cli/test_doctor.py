"""`localllm doctor` as a process on this machine."""

import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

Finished = subprocess.CompletedProcess[str]
NO_NETWORK = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise SystemExit(f"{event}{arguments}")

sys.addaudithook(refuse)
from localllm.__main__ import main
sys.exit(main())
"""


SECRETS = {
    "HF_TOKEN": "hf_hunter2",
    "HTTPS_PROXY": "http://me:hunter2@proxy:3128",
    "HF_ENDPOINT": "https://me:hunter2@mirror.example",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder."""
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def doctor(place: Path):
    """Run the doctor without the developer's settings."""

    def run(*arguments: str, code: str | None = None, **variables: str) -> Finished:
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        own = {"LOCALLLM_HOME": str(place / "home"), "HF_HOME": str(place / "hf"), "OMP_NUM_THREADS": "1"}
        start = ["-c", code] if code else ["-m", "localllm"]
        command = [sys.executable, *start, "doctor", *arguments]
        return subprocess.run(command, env=kept | own | variables, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture(scope="module")
def printed(doctor) -> str:
    """Output in an environment with secrets."""
    done = doctor(**SECRETS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def as_json(doctor) -> str:
    done = doctor("--json", code=NO_NETWORK, **SECRETS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_a_machine_as_it_is(as_json: str, place: Path) -> None:
    seen = json.loads(as_json)
    assert seen["fine"] and not any(finding["breaks_run"] for finding in seen["findings"])
    assert seen["versions"]["Python"] == platform.python_version()
    assert seen["versions"]["torch"] == torch.__version__
    assert seen["processor"]["cores"] == len(os.sched_getaffinity(0))
    assert seen["processor"]["threads"] == 1
    assert 0 < seen["processor"]["free_bytes"] < seen["processor"]["memory_bytes"]
    assert len(seen["gpus"]) == len(seen["measured"]) - 1
    assert seen["measured"][0]["device"] == "cpu"
    assert all(0 < rate < math.inf for rate in seen["measured"][0]["rates"].values())
    assert all((measured["packed"] is not None) == (measured["device"] == "cpu") for measured in seen["measured"])
    assert 0 < seen["measured"][0]["packed"] < math.inf
    assert seen["boxed"]["tokens"] > 0 and seen["boxed"]["tokens_per_s"] > 0
    assert seen["cache"] | {"path": str(place / "hf" / "hub"), "exists": False, "models": 0} == seen["cache"]
    assert (seen["cache"]["because"], seen["home"]["because"]) == ("HF_HOME", "LOCALLLM_HOME")
    assert not (place / "hf").exists()  # it looks, and makes nothing


@pytest.mark.slow
def test_text_output(printed: str) -> None:
    blocks = printed.removesuffix("\n").split("\n\n")
    assert [block.split("\n")[0] for block in blocks[:-1]] == ["VERSIONS", "DEVICES", "SPEED", "MODELS", "HUB"]
    rows = [re.match(r"\S+( \S+)*  +", line) for block in blocks[:-1] for line in block.split("\n")[1:]]
    assert len({row.end() for row in rows if row}) == 1 and all(rows)
    assert "tokens/s on" in printed
    assert re.search(r"(?m)^cpu read INT4 +[\d.]+ [MG]B/s of weights, \d+% of memory bandwidth$", printed)
    assert blocks[-1] == "No problems found." or all(line.startswith("note: ") for line in blocks[-1].split("\n"))


@pytest.mark.slow
def test_secrets_are_never_printed_and_settings_are(printed: str, as_json: str) -> None:
    for said in (printed, as_json):
        assert "hunter2" not in said
        assert all(words in said for words in ("HF_TOKEN", "***@proxy:3128", "***@mirror.example"))
    assert json.loads(as_json)["hub"]["offline"] is True


@pytest.mark.slow
def test_folders_that_cannot_be_written_are_notes(doctor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    within = {name: str(tmp_path / "file" / name) for name in ("HF_HUB_CACHE", "LOCALLLM_HOME")}
    done = doctor(**within)
    assert (done.returncode, done.stderr) == (0, "")
    for name in within:
        [line] = [line for line in done.stdout.splitlines() if line.startswith("note: ") and name in line]
        assert "is not writable" in line and "; " in line


def test_a_torch_that_cannot_be_imported_is_reported(doctor, tmp_path: Path) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: no such file')")
    root = str(Path(__file__).parents[2])
    done = doctor(PYTHONPATH=os.pathsep.join([str(tmp_path / "broken"), root]), code=NO_NETWORK)
    assert (done.returncode, done.stderr) == (1, "")
    assert "broken: torch cannot be imported (OSError: libcudart.so: no such file); reinstall" in done.stdout
    assert "does not run" in done.stdout


@pytest.mark.slow
def test_a_model_that_does_not_answer_is_a_failure(doctor) -> None:
    done = doctor("--json", LOCALLLM_DEVICE="cuda:999")
    assert done.returncode == 1
    seen = json.loads(done.stdout)
    [broken] = [finding for finding in seen["findings"] if finding["breaks_run"]]
    assert not seen["fine"] and "does not run" in broken["what"]
    assert "CUDA" in broken["what"] or "cuda:999" in broken["what"]


@pytest.mark.slow
def test_an_invalid_setting_is_reported(doctor) -> None:
    done = doctor(LOCALLLM_DTYPE="int3")
    assert (done.returncode, done.stderr) == (1, "")
    assert "does not run (there is no dtype 'int3'" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_self_test_without_a_gpu_is_one_sentence_and_exit_code_3(doctor) -> None:
    done = doctor("--gpu-selftest")
    assert (done.returncode, done.stdout) == (3, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: there is no CUDA device: ")
    assert line.endswith("needs an NVIDIA GPU of sm_80 or newer, or an AMD GPU with a ROCm build of torch")
