"""Offered and recommended models."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import localllm
from localllm.arch.cost import WeightBytes
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.cli import offers as module
from localllm.cli.models import list_entries
from localllm.cli.offers import (
    ASSUMED_BANDWIDTH,
    COMFORTABLE_SHARE,
    MIN_TOKENS_PER_S,
    OVERHEAD_BYTES,
    Candidate,
    TargetDevice,
    list_offers,
    offer_from_entry,
    recommend,
)
from localllm.errors import LocalLLMError
from localllm.hardware.device import resolve_device, resolve_dtype
from localllm.hardware.measure import RateSetup
from localllm.hub.catalog import PACKAGE_FOLDER, catalog, catalog_entries
from localllm.hub.hf_cache import cached_folder
from localllm.hub.names import RepoName
from localllm.hub.pull import plan_pull, pull
from localllm.plan.fit import FreeMemory, LoadOptions, fit_model
from localllm.plan.measured import DECODE_SHARE
from localllm.plan.memory import MemoryNeeds, allocate_minimum
from localllm.settings import Settings
from tests.hub.answers import Reply
from tests.hub.faults import refused
from tests.hub.models import Watcher
from tests.hub.real_configs import REAL_CONFIGS
from tests.hub.test_catalog import COUNTED, model_of
from tests.tui.host import offer

GB = 10**9
MANY_KEYS = ("gemma4:31b", "phi3.5:3.8b", "olmo2:7b", "olmo-3:7b")  # in 4 bits: a cache of half the weights' size


@pytest.fixture
def home(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def here(home, monkeypatch):
    """Offers of a machine with the given free memory."""

    def found(free: int = 16 * GB, **wish):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)
        return {each.name: each for each in list_offers(LoadOptions(**wish), "cpu", Settings.from_environment())}

    return found


def candidate(name, billions, gigabytes, active=None, gated=False, **fields):
    """Candidate for a memory with 16 GB free, without a known speed."""
    known = {"needs_bytes": int((gigabytes + 1) * GB), "free_bytes": 16 * GB, "tokens_per_s": None} | fields
    return Candidate(offer(name, **known), billions, active or billions, int(gigabytes * GB), gated)


def test_downloaded_models_come_first_and_the_catalogue_is_complete(here):
    found = list(here().values())
    assert found[0].name == "demo"
    assert [each.is_here for each in found] == sorted((each.is_here for each in found), reverse=True)
    unknown = [not each.is_here and each.needs_bytes is None for each in found]
    assert any(unknown) and unknown == sorted(unknown), "models of unknown size are last"
    assert {entry.name for entry in catalog_entries() if not entry.embeds} <= {each.name for each in found}


def test_the_fit_of_a_downloaded_model_comes_from_its_plan(here):
    demo = here()["demo"]
    header = read_header(PACKAGE_FOLDER / "boxed" / "demo")
    planned = fit_model(
        header, parse_config(header.config), FreeMemory("cpu", 16 * GB), LoadOptions(), name="demo"
    )
    assert demo.fits
    assert planned.weights.total < demo.needs_bytes < planned.memory.total + planned.workspace
    assert demo.free_bytes == 16 * GB
    tight = here(free=3_000_000)["demo"]
    assert tight.fits is False
    assert tight.needs_bytes > 3_000_000


def test_a_longer_context_needs_more(here):
    assert here(context=512)["demo"].needs_bytes > here(context=64)["demo"].needs_bytes


def test_the_flag_quant_makes_models_of_the_catalogue_smaller_and_leaves_files_of_gguf(here):
    plain, quantized = here(), here(quant="int4")
    assert quantized["qwen3:4b-bf16"].needs_bytes < plain["qwen3:4b-bf16"].needs_bytes * 2 / 3
    assert quantized["qwen3:4b-q4_k_m"].needs_bytes == plain["qwen3:4b-q4_k_m"].needs_bytes
    assert quantized["demo"].fits, "it is quantized already"


@pytest.mark.parametrize("entry", [entry for entry in COUNTED if entry.bytes], ids=lambda entry: entry.name)
def test_the_context_allowance_is_near_a_usual_context(entry):
    config = parse_config(REAL_CONFIGS[model_of(entry)])
    needs = MemoryNeeds(entry.name, config, WeightBytes(entry.bytes, 0, 0, 0), "cpu", "bfloat16", "bfloat16")
    memory = allocate_minimum(needs, min(4096, config.max_context))
    beside = memory.total + memory.workspace - memory.weights.total
    assert beside < OVERHEAD_BYTES + entry.bytes / 6 or entry.name in MANY_KEYS


def test_an_offer_says_what_keeps_it_from_running(here, hub, cache):
    hub.add("org/whole", PACKAGE_FOLDER / "boxed" / "demo")
    pull(plan_pull(RepoName("org/whole"), print), Watcher())
    assert here()["org/whole"].is_here
    assert here()["org/whole"].fits
    next(cache.rglob("model.safetensors")).resolve().write_bytes(b"no weights")
    assert here()["org/whole"].fits is None
    assert "model.safetensors" in here()["org/whole"].about


def test_a_partial_download_is_offered_as_in_the_catalogue(here, hub, cache):
    repo, before = "HuggingFaceTB/SmolLM2-135M-Instruct", here()["smollm2:135m-bf16"]
    hub.add(repo, PACKAGE_FOLDER / "boxed" / "demo")
    plan = plan_pull(RepoName(repo), print)

    def refused_once_small_files_are_here(reply: Reply) -> Reply | None:
        end = time.monotonic() + 60
        while not list(cache.rglob("config.json")) and time.monotonic() < end:
            time.sleep(0.01)
        return refused(404)(reply)

    hub.disturb(refused_once_small_files_are_here, "model.safetensors", times=None)
    with pytest.raises(LocalLLMError):
        pull(plan, Watcher())
    assert cached_folder(repo, "main")
    assert here()["smollm2:135m-bf16"] == before
    hub.faults.clear()
    pull(plan_pull(RepoName(repo), print), Watcher())
    assert here()["smollm2:135m-bf16"].is_here


def test_no_speed_is_shown_or_measured_where_none_is_known(here, home):
    assert all(each.tokens_per_s is None for each in here().values())
    assert not home.exists()


def test_speeds_come_from_earlier_measurements(here, home):
    cpu = resolve_device("cpu")
    setup = RateSetup.of(cpu, resolve_dtype("auto", "BF16", cpu))
    kept = [{"setup": vars(setup), "rates": {"copy": 1e10, "read": 1e10, "flops": 1e12, "share": 1.0}}]
    home.mkdir()
    (home / "rates.json").write_text(json.dumps({"kept": kept}))
    found = here()
    assert found["qwen3:8b"].tokens_per_s == pytest.approx(DECODE_SHARE * 1e10 / 5e9)
    mixture = found["gpt-oss:20b-mxfp4"]
    assert mixture.tokens_per_s == pytest.approx(DECODE_SHARE * 1e10 / 12e9 * 20.9 / 4.19), "a token meets a fifth"
    assert found["llama3.3:70b"].tokens_per_s is None, "what does not fit is not slow: it does not run"


def test_recorded_answers_give_the_speed(here, home):
    assert here()["demo"].tokens_per_s is None
    with localllm.load("demo", draft="off") as llm:
        *_, last = llm.stream("Once upon a time", llm.default_params)
        llm.record(last.metrics, home, print)
        assert here()["demo"].tokens_per_s == pytest.approx(last.metrics.tokens_per_s, rel=0.5)


def test_the_strongest_that_fits_and_is_fast_enough_is_recommended():
    small, better = candidate("small", 0.5, 0.4), candidate("better", 1.7, 1.1)
    slow = candidate("slow", 8, 5)
    assert recommend([small, slow, better], "cpu") is better.offer
    assert recommend([small, slow, better], "cuda") is slow.offer, "a GPU reads all it holds many times a second"


def test_a_measured_speed_outweighs_an_estimate():
    fast = candidate("fast", 8, 5, tokens_per_s=MIN_TOKENS_PER_S)
    slow = candidate("slow", 1, 0.5, tokens_per_s=MIN_TOKENS_PER_S - 1)
    assert recommend([fast, slow], "cpu") is fast.offer
    assert recommend([slow], "cpu") is None


def test_memory_is_left_to_others():
    most = COMFORTABLE_SHARE * 16
    assert recommend([candidate("just", 8, most - 1)], "cuda")
    assert recommend([candidate("more", 8, most - 0.9)], "cuda") is None


def test_gated_models_are_not_recommended_and_downloaded_ones_preferred():
    gated, here, there = (
        candidate("gated", 9, 3, gated=True),
        candidate("here", 8, 3, is_here=True),
        candidate("t", 8, 2),
    )
    assert recommend([gated, there, here], "cuda") is here.offer


def test_models_for_code_or_translation_are_not_recommended(here):
    found = [here(free * GB).values() for free in (8, 16, 24, 32, 48)]
    best = [each.name for offers in found for each in offers if each.recommended]
    assert len(best) == len(found) and not [name for name in best if catalog()[name].purpose]
    coder = replace(candidate("coder", 8, 5), purpose="code")
    assert recommend([coder, weaker := candidate("weaker", 4, 3)], "cuda") is weaker.offer


def test_the_purpose_of_a_downloaded_model_is_known(home, hub):
    hub.add("Qwen/Qwen2.5-Coder-7B-Instruct", PACKAGE_FOLDER / "boxed" / "demo")
    pull(plan_pull(RepoName("Qwen/Qwen2.5-Coder-7B-Instruct"), print), Watcher())
    target = TargetDevice.resolve(LoadOptions(), "cpu", Settings.from_environment())
    [entry] = [each for each in list_entries() if each.is_here and each.name == "qwen2.5-coder:7b-bf16"]
    _, coder = offer_from_entry(entry, target)
    assert coder.purpose == "code"


def test_a_mixture_ranks_by_mean_size_and_active_parameters():
    mixture, dense = candidate("mixture", 8, 5, active=2), candidate("dense", 3, 1.7)
    assert recommend([mixture, dense], "cpu") is mixture.offer
    assert mixture.tokens_per_s("cpu") == pytest.approx(ASSUMED_BANDWIDTH["cpu"] / (5 * GB / 4))


def test_something_is_recommended_for_machines_of_every_size_and_it_is_of_the_catalogue(here):
    strength = []
    for free in (1 * GB, 3 * GB, 8 * GB, 24 * GB):
        [best] = [each for each in here(free).values() if each.recommended]
        assert best.needs_bytes <= COMFORTABLE_SHARE * free
        strength.append(best.needs_bytes)
    assert strength == sorted(strength)


def test_answers_of_a_server_import_neither_downloads_nor_screens():
    slow = {"torch", "huggingface_hub", "textual"}
    code = f"import sys, localllm.cli.run; print(sorted({slow} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
