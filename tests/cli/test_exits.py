"""Failures give one sentence with the remedy and the documented exit code, with the real engine. One case of each
kind runs as a process, as each takes two seconds to start."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.llm.test_llm import PROMPT, STORY
from tests.shared import shared

Finished = subprocess.CompletedProcess[str]
Program = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared("stories260K"), tmp_path / "model"))


def in_a_process(*arguments: str, piped: bytes = b"") -> Finished:
    done = subprocess.run(
        [sys.executable, "-m", "localllm", *arguments], input=piped, capture_output=True, timeout=120
    )
    return Finished(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def poison(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][5] = torch.nan
    save_file(weights, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["RwkvForCausalLM"]}))


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (poison, 7, "norm.weight' is NaN or infinite"),
        (truncate, 7, "model.safetensors is damaged"),
        (change_family, 8, "the family 'RwkvForCausalLM' is not supported"),
        (pickle, 8, "can execute code when they are opened"),
        (lambda folder: (folder / "tokenizer.json").unlink(), 8, "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), 7, "tokenizer.json"),
        (lambda folder: shutil.rmtree(folder), 8, "there is no folder"),
    ],
    ids=["NaN", "truncated", "family", "pickle", "no tokenizer", "broken tokenizer", "no folder"],
)
def test_a_model_that_cannot_be_run(
    folder: Path, real: Program, damage: Callable[[Path], object], code: int, words: str
) -> None:
    damage(folder)
    got, out, err = real("run", str(folder), "Once", "--raw", "--max-tokens", "3")
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert "; " in err


@pytest.mark.parametrize(
    ("arguments", "piped", "code", "words"),
    [
        ([], b"caf\xe9", 2, "not valid UTF-8 at byte 3"),
        ([], b"", 2, "the prompt is empty"),
        ([""], b"", 2, "the prompt is empty"),
        (["word " * 600], b"", 4, "the context holds 512"),
        (["word " * 60, "--context", "64"], b"", 4, "--context"),
        (["Once", "--device", "cuda:7"], b"", 3, "device"),
        (["Once", "--dtype", "int3"], b"", 2, "dtype"),
        (["Once", "--top-p", "2"], b"", 2, "top-p is 2.0"),
    ],
    ids=lambda value: None if isinstance(value, list | bytes | int) else value,
)
def test_an_invalid_request(
    folder: Path, real: Program, arguments: list[str], piped: bytes, code: int, words: str
) -> None:
    got, out, err = real("run", str(folder), *arguments, piped=piped)
    *notes, last = err.splitlines()
    assert (got, out) == (code, "")
    assert last.startswith("error: ") and words in last
    assert all(note.startswith("note: ") for note in notes)


@pytest.mark.slow
def test_stdout_is_the_known_story_alone(folder: Path) -> None:
    done = in_a_process("run", str(folder), PROMPT, "--raw", "--temperature", "0", "--max-tokens", "80")
    assert (done.returncode, done.stdout, done.stderr) == (0, STORY, "")


@pytest.mark.parametrize("flags", [["--raw"], []], ids=["text", "chat"])
def test_a_tokenizer_of_another_model(folder: Path, real: Program, flags: list[str]) -> None:
    shutil.copy(shared("tokenizers/qwen3/tokenizer.json"), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code, out, err = real("run", str(folder), "The quick brown fox", *flags)
    assert (code, out) == (7, "")
    assert "to different models" in err


def test_a_full_disk_is_no_fault_of_ours(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "localllm", "list"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=200
        )
    assert done.returncode == 1
    assert done.stderr == "error: no space left on device; check free disk space and permissions\n"


@pytest.mark.slow
def test_a_length_limit_can_be_a_failure_that_keeps_its_text(folder: Path) -> None:
    flags = ("--raw", "--temperature", "0", "--max-tokens", "3", "--fail-on-length")
    done = in_a_process("run", str(folder), PROMPT, *flags)
    assert (done.returncode, done.stdout) == (6, STORY[: len(done.stdout)])
    assert "--max-tokens (3)" in done.stderr
