"""The program end to end with the real engine and the bundled model."""

import importlib.util
import json
import subprocess
import sys

import pytest

from localllm.hub.catalog import bundled_folder, catalog

DEMO = bundled_folder(catalog()["demo"])
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("localllm.llm.loader") is None, reason="the engine is not in this tree"
    ),
    pytest.mark.skipif(not (DEMO and DEMO.exists()), reason="the boxed model is not in this tree"),
]


def in_a_process(*arguments, piped=b""):
    return subprocess.run(
        [sys.executable, "-m", "localllm", *arguments], input=piped, capture_output=True, timeout=120
    )


@pytest.mark.slow
def test_a_story_from_the_box():
    done = in_a_process("run", "demo", "Tell me a story about a fox", "--seed", "1", "--max-tokens", "120")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "fox" in done.stdout.decode()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text(real):
    flags = ("run", "demo", "Hello", "--seed", "5", "--max-tokens", "20", "--json")
    first, second = (json.loads(out) for out in (in_a_process(*flags).stdout, real(*flags)[1]))
    assert (first["text"], first["token_ids"]) == (second["text"], second["token_ids"])
    assert first["metrics"]["load_s"] > 0


@pytest.mark.slow
def test_piped_text_and_a_reader_that_leaves_early():
    run = f"{sys.executable} -m localllm run demo 'Tell me a story'"
    command = f"echo notes | {run} | head -c 1; echo ${{PIPESTATUS[1]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.stdout.endswith(b"0\n")
    assert done.stderr == b""


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(real):
    code, out, err = real("run", "demo", "hello " * 50, "--context", "32")
    assert (code, out) == (4, "")
    assert "the context holds 32" in err


def test_verbose_and_log_probabilities(real):
    code, out, err = real(
        "run", "demo", "Hello", "--json", "--verbose", "--logprobs=2", "--prompt-logprobs=0", "--max-tokens=4"
    )
    answer = json.loads(out)
    assert code == 0
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert len(answer["prompt_logprobs"]) == answer["metrics"]["prompt_tokens"] - 1
    assert "TTFT" in err


def test_show_of_the_bundled_model(real):
    shown = json.loads(real("show", "demo", "--json")[1])
    assert (shown["state"], shown["chat_templates"]) == ("boxed", ["default"])
