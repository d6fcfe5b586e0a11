"""The comparison of models.toml with a local Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.arch.cost import parameter_count
from localllm.arch.describe import parse_config
from localllm.formatting import format_count
from tests.hub.faults import edited
from tests.hub.folders import write_model
from tests.hub.loopback import LoopbackHub
from tests.tiny import make_checkpoint
from tools.catalog import compare_fact, stated_license

ROOT = Path(__file__).parents[2]
NAME, REPO = "smollm2:135m-bf16", "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture
def compare(hub, tmp_path):
    """Run the tool; return its exit code, lines and stderr."""

    def run(*names):
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, ROOT / "tools" / "catalog.py", *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def add(hub, tmp_path, repo=REPO, card=None, **access):
    """Add a small Llama under the name of a model of the catalogue."""
    make_checkpoint(tmp_path / "model", "Llama")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    hub.add(repo, tmp_path / "model", **access)
    page = rf"/api/models/{repo}(/revision/\w+)?(\?|$)"
    hub.disturb(edited(lambda facts: facts.update(cardData=card)), page, times=None)


def test_each_difference_is_reported(hub, tmp_path, compare):
    add(hub, tmp_path, card={"license": "other", "license_name": "mine"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    code, lines, err = compare(NAME)
    assert (code, err) == (1, "")
    facts = [line.removeprefix(f"{NAME}: ") for line in lines[:-1]]
    assert facts[0] == "license is apache-2.0 here, mine on the Hub"
    assert facts[1].startswith("bytes is 270000000 here, ")
    assert facts[2].startswith("parameters is 135M here, ")
    assert facts[3] == f"context is 8192 here, {config['max_position_embeddings']} on the Hub"
    assert lines[-1] == "1 models, 1 of them differ from the Hub or could not be read"


def test_matching_facts_are_not_reported(hub, tmp_path):
    add(hub, tmp_path, repo="org/tiny", card={"license": "mit"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    files = next(iter(hub.repositories["org/tiny"].commits.values()))
    fields = {
        "name": "tiny:24k",
        "repo": "org/tiny",
        "license": "mit",
        "about": "small",
        "bytes": sum(len(file.body) for file in files.values()),
        "context": config["max_position_embeddings"],
        "parameters": format_count(parameter_count(parse_config(config))),
    }
    code = f"from tools.catalog import *; print(report(CatalogEntry(**{fields!r})))"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_public_facts_of_a_gated_model_are_compared(hub, tmp_path, compare):
    add(hub, tmp_path, card={"license": "apache-2.0"}, gated="manual")
    code, lines, _ = compare(NAME)
    assert code == 1
    assert lines[0] == f"{NAME}: gated is False here, True on the Hub"
    assert "is gated: its authors require you to accept their terms" in lines[-2]


def test_a_model_that_is_gone_hides_no_other(hub, tmp_path, compare):
    add(hub, tmp_path)
    code, lines, _ = compare("smollm2:360m", NAME)
    assert code == 1
    assert lines[0].startswith("smollm2:360m: not read: ")
    assert lines[1].startswith(f"{NAME}: bytes")


def test_a_family_that_does_not_run_is_reported(hub, tmp_path, compare):
    write_model(tmp_path / "model", architectures=["GPT2LMHeadModel"])
    hub.add(REPO, tmp_path / "model")
    assert "the family 'GPT2LMHeadModel' is not supported" in compare(NAME)[1][-2]


def test_an_unknown_name_is_refused(compare):
    assert compare("nonsense") == (2, [], "models.toml has no nonsense\n")


def test_rounded_values_do_not_differ():
    assert not [
        *compare_fact("bytes", 270, 271, 0.06),
        *compare_fact("context", 5, 5),
        *compare_fact("gated", False, False),
    ]
    assert list(compare_fact("bytes", 270, 300, 0.06)) == ["bytes is 270 here, 300 on the Hub"]
    assert list(compare_fact("bytes", None, 300, 0.06)) == ["bytes is not stated here, 300 on the Hub"]


@pytest.mark.parametrize(
    ("card", "license"),
    [(None, None), ({}, None), ({"license": "mit"}, "mit"), ({"license": "other"}, "other")],
)
def test_the_licence_is_read_from_the_card(card, license):
    assert stated_license(card) == license
