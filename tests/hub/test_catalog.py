import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.arch.cost import active_parameter_count, parameter_count
from localllm.arch.describe import parse_config
from localllm.checkpoint.layouts import check_quantization
from localllm.hub.catalog import CatalogEntry, catalog, catalog_entries
from localllm.hub.gguf import QUANT_NAME
from localllm.hub.names import ALIAS_NAME, REPO, RepoName, parse_name
from tests.hub.real_configs import OTHERS, REAL_CONFIGS

ROOT = Path(__file__).parents[2]
OF_THE_HUB = [entry for entry in catalog_entries() if entry.repo]
COUNTED = [entry for entry in OF_THE_HUB if entry.parameters]
UNITS = {"B": 1e9, "M": 1e6}
# What is quantized by others has its own repository; these hold the model of another one.
SMALL_24B = ("Mistral-Small-3.2-24B-Instruct-2506", "Magistral-Small-2509", "Devstral-Small-2-24B-Instruct-2512")


def model_of(entry: CatalogEntry) -> str:
    """The name under which `real_configs` knows the model of an entry."""
    name = entry.repo.split("/")[1].removesuffix("-GGUF")
    name = re.sub("^(Meta-(?=Llama)|microsoft_|ibm-granite_)", "", name)
    return "Mistral-Small-24B" if name in SMALL_24B else name


def count(stated: str) -> float:
    return float(stated[:-1]) * UNITS[stated[-1]]


def is_quantized(entry: CatalogEntry) -> bool:
    return bool(entry.quant) or entry.repo.startswith("openai/gpt-oss")


def names(models) -> list[str]:
    return [entry.name for entry in models]


def test_there_are_models_of_many_families():
    assert len(OF_THE_HUB) >= 45
    known = {REAL_CONFIGS[model_of(entry)]["architectures"][0] for entry in COUNTED}
    assert len(known) >= 20


@pytest.mark.parametrize("entry", catalog_entries(), ids=names(catalog_entries()))
def test_an_entry_is_well_formed_and_all_its_names_mean_it(entry):
    assert (entry.boxed is None) != (entry.repo is None)
    assert entry.quant is None or QUANT_NAME.fullmatch(entry.quant)
    assert entry.about
    assert "\n" not in entry.about
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        assert value is None or type(value).__name__ in str(field.type)
    for name in (entry.name, *entry.aliases):
        assert ALIAS_NAME.fullmatch(name)
        assert parse_name(name) == (RepoName(entry.repo, entry.revision, entry.quant) if entry.repo else entry)
    assert entry.repo is None or REPO.fullmatch(f"{entry.repo}@{entry.revision}")


def test_no_two_entries_are_the_same_model():
    sources = [(entry.repo, entry.revision, entry.quant) for entry in OF_THE_HUB]
    assert len(set(sources)) == len(sources)


def test_a_name_without_a_size_is_a_second_name_of_one_with_it():
    without = {entry.name.split(":")[0] for entry in OF_THE_HUB}
    assert without <= catalog().keys()
    assert all(":" in entry.name for entry in OF_THE_HUB)


def test_int4_and_int8_are_second_names_of_the_editions_of_so_many_bits():
    for name, entry in catalog().items():
        bits = re.search("-int([48])$", name)
        assert not bits or (entry.quant and f"Q{bits[1]}" in entry.quant)
    assert catalog()["gemma3:4b-int4"].repo == "ggml-org/gemma-3-4b-it-GGUF"


@pytest.mark.parametrize("entry", COUNTED, ids=names(COUNTED))
def test_a_model_runs_and_is_of_the_size_that_is_stated(entry):
    config = REAL_CONFIGS[model_of(entry)]
    check_quantization(config)
    model = parse_config(config)
    assert parameter_count(model) == pytest.approx(count(entry.parameters), rel=0.02)
    assert active_parameter_count(model) == pytest.approx(count(entry.active or entry.parameters), rel=0.02)
    if (
        model_of(entry) in OTHERS and entry.context and not entry.name.startswith("devstral")
    ):  # longer than its kin
        assert model.max_context == entry.context
    if entry.bytes:  # of all senses, where there are others
        bits = entry.bytes * 8 / parameter_count(model)
        # 6.5: rows that are no whole blocks of 256 are kept in more bits, as in the smallest Gemma 3
        least, most = (4.2, 8.7 if entry.quant == "Q8_0" else 6.5) if is_quantized(entry) else (15.2, 20)
        assert least < bits < most


def test_the_recommendation_follows_the_rule_in_the_head_of_the_file():
    for entry in OF_THE_HUB:
        size = count(entry.parameters or "8B")
        by_size = "bf16" if size < 2e9 else "int8" if size < 10e9 else "int4"
        assert entry.recommended == (None if entry.quant else "mxfp4" if is_quantized(entry) else by_size)


def test_the_terms_of_meta_and_google_have_to_be_accepted():
    """Those of Gemma 4 are a usual licence."""
    for entry in OF_THE_HUB:
        if (entry.license or "").startswith(("llama", "gemma")):
            assert entry.gated == entry.repo.startswith(("meta-llama/", "google/"))


def test_reading_it_takes_no_time():
    code = "import sys; from localllm.hub.catalog import catalog; catalog(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "huggingface_hub", "typer", "rich"} & set(loaded.split())
