"""Tab completion: the offered words, and their insertion by real shells."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.__main__ import COMPLETION_VARIABLE
from localllm.cli.complete import completions, split_words
from tests.cli.test_repl import Terminal
from tests.hub.folders import SNAPSHOT, write_cached, write_model
from tools.cli_docs import COMMAND_TABLE, command_table

ROOT = Path(__file__).parents[2]
CTRL_A = "\x01"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def words_at(line):
    return [word for word, _ in completions(line)]


def test_the_words_are_those_of_the_commands():
    assert COMMAND_TABLE.read_text(encoding="utf-8") == command_table(), (
        "commands.json is stale: run `python tools/cli_docs.py`"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("localllm sh", ["show"]),
        ("localllm help sh", ["show"]),
        ("localllm help show ", []),
        ("localllm run demo --activations ", ["auto", "24", "16", "8"]),
        ("localllm diff demo demo --kv-dtype-b f", ["fp8"]),
        ("localllm plan demo --quant q4", ["q4_k_m"]),
        ("localllm --ver", ["--version"]),
        ("localllm run --no-", ["--no-think", "--no-draft"]),
        ("localllm run demo --device ", ["auto", "cpu", "cuda"]),
        ("localllm run --device cu", ["cuda"]),
        ("localllm run --device=c", ["--device=cpu", "--device=cuda"]),
        ("localllm run --dtype b", ["bfloat16"]),
        ("localllm run --kv-dtype ", ["auto", "int8", "fp8", "k8v4", "int4"]),
        ("localllm run --system dem", []),  # a text
        ("localllm run --json dem", ["demo"]),  # a switch takes no value
        ("localllm run --system x dem", ["demo"]),
        ("localllm run --system=x dem", ["demo"]),
        ("localllm run 'dem", ["demo"]),
        ("localllm run demo de", []),  # a prompt
        ("localllm list d", []),
        ("localllm nonsense d", []),
        (
            "localllm show qwen3:0.6",
            [
                "qwen3:0.6b",
                "qwen3:0.6b-q4_k_m",
                "qwen3:0.6b-int4",
                "qwen3:0.6b-bf16",
                "qwen3:0.6b-q8_0",
                "qwen3:0.6b-int8",
            ],
        ),
        ("sudo -u me /usr/bin/localllm completion z", ["zsh"]),
        ("localllm completion zsh ", []),
        ("localllm", []),
        ("localllm run demo --draft-model dem", ["demo"]),
        ("localllm replay r.json --model=dem", ["--model=demo"]),
        ("localllm rm gemma3:4b-int4 dem", ["demo"]),
        ("localllm bench demo dem", ["demo"]),
        ("localllm run demo Hello dem", []),
        ("localllm serve --log-format j", ["json"]),
        ("localllm quantize demo --method s", ["smoothquant"]),
        ("localllm run demo --qui", ["--quiet"]),
        ("localllm run demo --stop-id ", []),
    ],
)
def test_offers_fit_the_position(line, expected):
    assert words_at(line) == expected


def test_first_come_the_commands():
    known = json.loads(COMMAND_TABLE.read_text(encoding="utf-8"))["commands"]
    assert words_at("localllm ") == list(known)
    assert "completion" in known


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a b", ["a", "b"]),
        ("a b ", ["a", "b", ""]),
        ("a 'b c", ["a", "b c"]),
        ('a "b', ["a", "b"]),
        ("a b\\", ["a", "b"]),
        ("a #b", ["a", "#b"]),
        ("", [""]),
    ],
)
def test_a_line_is_split_as_shells_do(line, expected):
    assert split_words(line) == expected


def test_models_of_the_cache_are_offered_with_their_editions(tmp_path):
    write_cached(tmp_path / "cache", "someone/their-model")
    edition = write_cached(tmp_path / "cache", "someone/their-GGUF") / "their-Q4_K_M.gguf"
    edition.touch()
    (tmp_path / "cache" / "models--someone--their-empty" / "snapshots" / SNAPSHOT).mkdir(parents=True)
    (tmp_path / "cache" / "models--$(reboot)--x" / "snapshots" / SNAPSHOT).mkdir(parents=True)
    (tmp_path / "cache" / "models--$(reboot)--x" / "snapshots" / SNAPSHOT / "config.json").touch()
    found = ["someone/their-GGUF", "someone/their-GGUF:Q4_K_M", "someone/their-model"]
    assert words_at("localllm run someone/") == found
    assert not [word for word in words_at("localllm run ") if "$" in word]


def test_names_that_the_user_gave_are_offered(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "aliases.json").write_text(json.dumps({"mine": "qwen3:8b", "not a name": "x"}))
    assert ("mine", "an alias") in completions("localllm run mi")
    assert "not a name" not in words_at("localllm run ")


def test_saved_conversations_are_completed(tmp_path):
    assert words_at("localllm run demo --resume ") == []
    (tmp_path / "home" / "chats").mkdir(parents=True)
    for name in ("fox", "moon"):
        (tmp_path / "home" / "chats" / f"{name}.json").touch()
    assert words_at("localllm run demo --resume ") == ["last", "fox", "moon"]
    assert words_at("localllm chats --rm mo") == ["moon"]


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1, "a": 2}'])
def test_a_damaged_alias_file_hides_no_other_names(tmp_path, content):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "aliases.json").write_text(content)
    assert words_at("localllm run dem") == ["demo"]


def test_folders_and_files_that_hold_models_are_offered(here):
    write_model(here / "tiny")
    write_model(here / "models" / "tiny")
    write_model(here / "with space")
    (here / "tinsel").mkdir()
    (here / "tiny.gguf").touch()
    assert sorted(words_at("localllm run ti")) == ["tiny.gguf", "tiny/", "tinyllama", "tinyllama:1.1b"]
    assert words_at("localllm run models/") == ["models/tiny/"]
    assert not [word for word in words_at("localllm run ") if " " in word]
    assert words_at("localllm run ./t") == []  # a shell knows better


def ask(line):
    environment = os.environ | {COMPLETION_VARIABLE: line, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "localllm"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_completion_imports_nothing_slow(tmp_path):
    for i in range(100):
        write_cached(tmp_path / "cache", f"someone/model-{i}")
    done = ask("localllm run ")
    assert len(done.stdout.splitlines()) > 200
    assert "someone/model-99\tin the cache\n" in done.stdout
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "typer", "rich", "httpx2", "huggingface_hub.file_download", "localllm.cli.app"} & loaded
    assert not {"pydantic", "textual", "jinja2", "http.client", "ssl", "asyncio"} & loaded


def test_a_shell_never_sees_an_error(tmp_path):
    (tmp_path / "home").write_text("no folder")
    done = ask("localllm run '")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.fixture
def shell(tmp_path, here):
    """Start a shell with completion in a terminal."""
    opened = []
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "localllm"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m localllm "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "TERM": "xterm",
    }

    def start(name, *arguments, set_up):
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is not installed here")
        opened.append(Terminal(*arguments, program=(path,), **environment))
        opened[-1].type(f"{set_up}; echo rea''dy\r")
        opened[-1].see("ready\n")
        return opened[-1]

    yield start
    for one in opened:
        one.close()


SHELLS = {
    "bash": (("--norc", "--noprofile", "-i"), 'PS1=">"; eval "$(localllm completion bash)"'),
    "zsh": (("-f", "-i"), 'PS1=">"; autoload -Uz compinit; compinit -u; eval "$(localllm completion zsh)"'),
    "fish": (("--no-config", "-i"), "localllm completion fish | source"),
}


@pytest.mark.parametrize("name", SHELLS)
def test_shells_insert_the_completion(shell, tmp_path, here, name):
    (write_cached(tmp_path / "cache", "someone/their-GGUF") / "their-Q4_K_M.gguf").touch()
    write_model(here / "tinsel-model")
    (here / "notes.txt").touch()
    (tmp_path / "home" / "chats").mkdir(parents=True)
    (tmp_path / "home" / "chats" / "moon.json").touch()
    arguments, set_up = SHELLS[name]
    terminal = shell(name, *arguments, set_up=set_up)
    for line, completed in {
        "localllm sho\tdem\t": "localllm show demo",
        "localllm run --dtype bf\tdem\t": "localllm run --dtype bfloat16 demo",
        "localllm run --device=cu\t": "localllm run --device=cuda",
        "localllm run qwen3:0.6b-q8\t": "localllm run qwen3:0.6b-q8_0",
        "localllm run gemma3:4b-i\t--see\t": "localllm run gemma3:4b-int4 --seed",
        "localllm show someone/their-GGUF:Q\t": "localllm show someone/their-GGUF:Q4_K_M",
        "localllm show tins\t": "localllm show tinsel-model/",
        "localllm show ./no\t": "localllm show ./notes.txt",
        "localllm run demo --schema no\t": "localllm run demo --schema notes.txt",
        "localllm run demo --qui\t--resume mo\t": "localllm run demo --quiet --resume moon",
    }.items():
        terminal.type(line)
        terminal.type(f"{CTRL_A}echo @''@ \r")
        terminal.see(f"@@ {completed}\n")
    terminal.type("true; localllm show dem\t\r")
    terminal.see("name            demo\n")
