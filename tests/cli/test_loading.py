"""Checks before a download: does the model run here, and does it fit?"""

import json
import re

import pytest

from localllm.cli import loading, pull
from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.plan.fit import FreeMemory
from tests.cli.fake_engine import FakeLLM
from tests.hub.models import model_files

DEMO = PACKAGE_FOLDER / "boxed" / "demo"
FAMILY = json.dumps({"architectures": ["BambaForCausalLM"], "model_type": "bamba"}).encode()
AWQ = json.dumps(
    json.loads((DEMO / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq", "bits": 3}}
).encode()


@pytest.fixture
def little_memory(monkeypatch):
    """A machine with 3 MB of memory, of which 1 MB is free."""
    monkeypatch.setenv("LOCALLLM_DTYPE", "float32")
    monkeypatch.setattr(pull, "total_memory", lambda device: FreeMemory("cpu", 3_000_000))
    monkeypatch.setattr(loading, "free_memory", lambda device: FreeMemory("cpu", 1_000_000))


@pytest.mark.parametrize(("command", "free"), [(["pull"], "3.00"), (["run"], "1.00")])
def test_a_model_that_does_not_fit_is_refused_before_the_download(hub, localllm, little_memory, command, free):
    hub.add("org/tiny", DEMO)
    code, out, err = localllm(*command, "org/tiny", *(["Hello"] if command == ["run"] else []))
    assert (code, out) == (3, "")
    assert re.match(rf"error: the weights of org/tiny need \S+ MB in float32, {free} MB are free; ", err)
    assert err.endswith("; --force downloads it anyway\n")
    assert hub.sent("model.safetensors") <= 2**17


def test_force_downloads_it_all_the_same(hub, localllm, little_memory):
    hub.add("org/tiny", DEMO)
    code, out, err = localllm("pull", "org/tiny", "--force")
    assert code == 0
    assert re.match(
        r"warning: the weights of org/tiny need \S+ MB in float32, 3.00 MB are free\npulling org/tiny", err
    )
    assert out.endswith("\n")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FAMILY, "error: the family 'BambaForCausalLM' is not supported; docs/models.md lists those that are"),
        (AWQ, "error: "),
    ],
)
def test_an_unsupported_model_is_refused_before_the_download(hub, localllm, config, message):
    hub.add("org/odd", model_files(**{"config.json": config}))
    code, out, err = localllm("pull", "org/odd")
    assert (code, out) == (8, "")
    assert err.startswith(message)
    assert err.endswith("; --force downloads it anyway\n")
    assert localllm("pull", "org/odd", "--force")[0] == 0


def test_downloaded_models_are_not_checked_again(hub, localllm, little_memory):
    hub.add("org/tiny", DEMO)
    localllm("pull", "org/tiny", "--force")
    assert localllm("pull", "org/tiny")[0] == 0


def test_plan_of_a_model_on_the_hub_fetches_its_header_alone(hub, localllm, cache):
    hub.add("org/tiny", DEMO)
    code, out, err = localllm("plan", "org/tiny", "--gpu", "h100", "--json")
    assert (code, err) == (0, "")
    there = json.loads(out)
    here = json.loads(localllm("plan", "demo", "--gpu", "h100", "--json")[1])
    assert there | {"model": "demo"} == here
    assert hub.sent("model.safetensors") <= 2**17
    assert not cache.exists()


def test_plan_reports_a_missing_connection(localllm, cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = localllm("plan", "org/tiny")
    assert (code, err) == (
        8,
        "error: org/tiny is not on this machine, and HF_HUB_OFFLINE is set; unset it to download\n",
    )


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
def test_a_gpu_without_graphs_is_reported_with_the_reason(localllm, monkeypatch, flags):
    run = ["run", "demo", "Hello", "--local", "--max-tokens", "1", *flags]
    reason = "Triton has no kernels for this device"
    assert reason not in localllm(*run)[2]
    monkeypatch.setattr(FakeLLM, "without_graphs", reason)
    code, out, err = localllm(*run)
    assert code == 0 and out
    assert [" ".join(line.split()) for line in err.splitlines() if reason in line] == [
        f"graphs no: {reason}"
        if flags
        else f"each kernel is launched individually on cpu, which is slower: {reason}"
    ]
