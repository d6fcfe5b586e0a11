"""`--cache-dir` and `localllm cache`: the next process reads what one computed, until it is deleted."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.cli.loading import disk_cache_of
from localllm.errors import UsageError
from localllm.formatting import parse_bytes
from localllm.settings import CONVERSATIONS_BYTES, DISK_CACHE_BYTES, DiskCache, Settings

PROMPT = "Once upon a time there was a little fox who lived in the green forest. " * 20

Run = Callable[..., tuple[int, str, str]]  # exit code, stdout and stderr


def in_a_process(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "localllm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_prompt_is_computed_once_until_the_cache_is_cleared(real: Run, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")

    def answer(run: Run) -> tuple[str, int, int]:
        flags = (
            "--cache-dir",
            folder,
            "--local",
            "--json",
            "--verbose",
            "--temperature",
            "0",
            "--max-tokens",
            "8",
        )
        code, out, err = run("run", "demo", *flags, PROMPT)
        assert code == 0, err
        fields = json.loads(out)
        metrics = fields["metrics"]
        assert ("of them from disk)" in err) is bool(metrics["disk_tokens"])
        return fields["text"], metrics["disk_tokens"], metrics["prompt_tokens"]

    text, loaded, prompt_len = answer(in_a_process)
    assert loaded == 0
    assert answer(real) == (text, prompt_len // 16 * 16, prompt_len)
    [model] = json.loads(real("cache", "list", "--cache-dir", folder, "--json")[1])["models"]
    assert model["model"] == "demo" and model["tokens"] >= prompt_len // 16 * 16
    assert "demo" in real("cache", "list", "--cache-dir", folder)[1]
    files = sorted(Path(folder).glob("*.safetensors"))
    damaged = bytearray(files[0].read_bytes())
    damaged[-1] ^= 1
    files[0].write_bytes(damaged)
    verified = json.loads(real("cache", "verify", "--cache-dir", folder, "--json")[1])
    assert (verified["checked"], verified["removed"]) == (len(files), [files[0].name])
    assert real("cache", "clear", "--cache-dir", folder)[1].startswith("removed ")
    assert not list(Path(folder).glob("*.safetensors"))
    assert answer(real)[:2] == (text, 0)


def test_wrong_arguments_are_named(real: Run, tmp_path: Path) -> None:
    code, _, err = real("cache", "drop")
    assert (code, err) == (2, "error: there is no action 'drop'; use one of list, clear, verify\n")
    assert "there is no folder" in real("cache", "list", "--cache-dir", str(tmp_path / "none"))[2]
    code, _, err = real("run", "demo", "--cache-size", "much", "Hi")
    assert (code, err) == (2, "error: 'much' is not a size; write for example 50GB or 512MiB\n")
    assert json.loads(real("cache", "list", "--json")[1])["models"] == []


def test_flags_and_the_setting_choose_the_folder(tmp_path: Path) -> None:
    settings = Settings.from_environment({"LOCALLLM_HOME": str(tmp_path)})
    default = tmp_path / "kv-cache"
    off = Settings.from_environment({"LOCALLLM_HOME": str(tmp_path), "LOCALLLM_CACHE": "off"})
    assert disk_cache_of(settings, None, None, keep_conversations=False) is None
    kept = DiskCache(default, CONVERSATIONS_BYTES, kept_only=True)
    assert disk_cache_of(settings, None, None, keep_conversations=True) == kept
    assert disk_cache_of(off, None, None, keep_conversations=True) is None
    named = DiskCache(tmp_path / "x", DISK_CACHE_BYTES)
    assert disk_cache_of(off, str(tmp_path / "x"), None, keep_conversations=True) == named
    assert disk_cache_of(settings, None, "2MB", keep_conversations=False) == DiskCache(default, 2_000_000)


@pytest.mark.parametrize(
    ("text", "size"),
    [("50GB", 50 * 10**9), ("1.5 TB", 15 * 10**11), ("512MiB", 2**29), ("7", 7), ("3k", 3000), ("2gib", 2**31)],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "GB", "1 G B", "1e9", "0.1B", "\u0661GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)
