import dataclasses
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from localllm.arch.cost import active_parameter_count, parameter_count
from localllm.arch.describe import parse_config
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import ModelNotFound
from localllm.hub.catalog import FOUR_BITS, CatalogEntry, catalog, catalog_entries, find_entry, ungated_name
from localllm.hub.gguf import QUANT_NAME, choose_model
from localllm.hub.names import ALIAS_NAME, REPO, RepoName, parse_name
from tests.hub.real_configs import OTHERS, REAL_CONFIGS
from tests.work import counted_lines

ROOT = Path(__file__).parents[2]
OF_THE_HUB = [entry for entry in catalog_entries() if entry.repo]
COUNTED = [entry for entry in OF_THE_HUB if entry.parameters]
UNITS = {"B": 1e9, "M": 1e6}
# What is quantized by others has its own repository; these hold the model of another one.
SMALL_24B = ("Mistral-Small-3.2-24B-Instruct-2506", "Magistral-Small-2509", "Devstral-Small-2-24B-Instruct-2512")

SIZES_NOT_COUNTED = {"ibm-granite/granite-4.1-30b": "30B", "LiquidAI/LFM2-24B-A2B": "24B"}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Hide the developer's aliases, once for a thousand tests that write none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def model_of(entry: CatalogEntry) -> str:
    """Name of the entry's model in `real_configs`."""
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


def test_names_without_a_size_are_aliases():
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
        least, most = (4.2, 8.7 if entry.quant == "Q8_0" else 7.2) if is_quantized(entry) else (15.2, 20.5)
        if entry.embeds and not entry.quant:
            most = 33  # many are stored in float32
        if entry.repo == "deepseek-ai/DeepSeek-V3":
            least = 8
        assert least < bits < most


def test_the_recommendation_follows_the_rule_in_the_head_of_the_file():
    for entry in OF_THE_HUB:
        size = count(entry.parameters or SIZES_NOT_COUNTED.get(entry.repo, "8B"))
        by_size = "bf16" if size < 2e9 else "int8" if size < 10e9 else "int4"
        assert entry.recommended == (
            None if entry.quant or entry.embeds else "mxfp4" if is_quantized(entry) else by_size
        )


def test_all_editions_of_a_model_have_its_purpose():
    for entry in OF_THE_HUB:
        assert entry.purpose in (None, "code", "translation", "moderation")
        assert entry.purpose == catalog()[entry.name.removesuffix("-bf16")].purpose, entry.name
        assert (entry.purpose == "code") == any(word in entry.name for word in ("code", "devstral")), entry.name


def test_the_terms_of_meta_and_google_have_to_be_accepted():
    """Gemma 4 has a common licence instead."""
    for entry in OF_THE_HUB:
        if (entry.license or "").startswith(("llama", "gemma")):
            assert entry.gated == entry.repo.startswith(("meta-llama/", "google/"))


def test_no_plain_name_needs_a_login():
    """Covers names with and without a size, which people type first."""
    plain = {entry.name for entry in OF_THE_HUB if not entry.name.endswith("-bf16")}
    assert [name for name in plain if catalog()[name].gated] == []
    assert [entry.name for entry in OF_THE_HUB if entry.gated and ungated_name(entry.repo) is None] == []


def test_a_plain_name_is_the_edition_in_4_bits_where_there_is_one():
    for entry in OF_THE_HUB:
        if published := catalog().get(f"{entry.name}-bf16"):
            assert entry.quant in ("Q4_K_M", "UD-Q4_K_M")
            assert published.quant is None


# What Ollama's library has under these names, as its pages list the tags.
OF_OLLAMA = {
    "llama3.1": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "llama3": "bartowski/Meta-Llama-3-8B-Instruct-GGUF",
    "llama2": "unsloth/llama-2-7b-chat",
    "gemma2": "bartowski/gemma-2-9b-it-GGUF",
    "gemma3:270m": "unsloth/gemma-3-270m-it-GGUF",
    "command-r7b": "bartowski/c4ai-command-r7b-12-2024-GGUF",
    "phi3": "microsoft/Phi-3-mini-128k-instruct",
    "phi3:14b": "bartowski/Phi-3-medium-128k-instruct-GGUF",
    "qwen": "Qwen/Qwen1.5-4B-Chat",
    "qwen3:4b": "unsloth/Qwen3-4B-Thinking-2507-GGUF",
    "qwen3:30b": "unsloth/Qwen3-30B-A3B-Thinking-2507-GGUF",
    "qwen3-next:80b": "unsloth/Qwen3-Next-80B-A3B-Thinking-GGUF",
    "olmo-3:7b": "unsloth/Olmo-3-7B-Think-GGUF",
    "lfm2": "LiquidAI/LFM2-24B-A2B-GGUF",
    "mistral-small": "bartowski/Mistral-Small-24B-Instruct-2501-GGUF",
    "nomic-embed-text": "nomic-ai/nomic-embed-text-v1.5",
    "mxbai-embed-large": "mixedbread-ai/mxbai-embed-large-v1",
    "bge-m3": "gpustack/bge-m3-GGUF",
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "all-minilm:33m": "sentence-transformers/all-MiniLM-L12-v2",
    "qwen3-embedding:0.6b": "Qwen/Qwen3-Embedding-0.6B",
    "snowflake-arctic-embed": "Snowflake/snowflake-arctic-embed-l",
    "embeddinggemma": "ggml-org/embeddinggemma-300M-GGUF",
    "deepseek-coder": "deepseek-ai/deepseek-coder-1.3b-instruct",
    "dolphin3": "bartowski/Dolphin3.0-Llama3.1-8B-GGUF",
    "deepseek-coder:6.7b": "deepseek-ai/deepseek-coder-6.7b-instruct",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "codellama": "codellama/CodeLlama-7b-Instruct-hf",
    "qwen2": "Qwen/Qwen2-7B-Instruct-GGUF",
    "qwen2.5-coder:0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    "qwen2.5-coder:3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF",
    "qwen3-coder-next": "unsloth/Qwen3-Coder-Next-GGUF",
    "qwen3-embedding": "Qwen/Qwen3-Embedding-8B",
    "qwen3-embedding:4b": "Qwen/Qwen3-Embedding-4B",
    "translategemma": "bullerwins/translategemma-4b-it-GGUF",
    "falcon3:10b": "tiiuae/Falcon3-10B-Instruct-GGUF",
    "lfm2.5": "LiquidAI/LFM2.5-1.2B-Instruct-GGUF",
    "granite4.1:3b": "unsloth/granite-4.1-3b-GGUF",
    "granite4.1:30b": "unsloth/granite-4.1-30b-GGUF",
    "gpt-oss-safeguard:20b": "openai/gpt-oss-safeguard-20b",
    "phi4-mini-reasoning": "unsloth/Phi-4-mini-reasoning-GGUF",
}


@pytest.mark.parametrize("name", OF_OLLAMA)
def test_ollama_names_resolve_to_the_same_model(name):
    assert (
        parse_name(name).repo == parse_name(f"{name}:latest" if ":" not in name else name).repo == OF_OLLAMA[name]
    )


def test_the_documentation_states_what_ambiguous_names_mean():
    rows = re.findall(r"^\| `(\S+)` \| `(\S+/\S+)` \|", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert {"phi3", "qwen3:4b", "qwen3:30b", "qwen3-next:80b", "olmo-3:7b", "glm4", "lfm2"} <= dict(rows).keys()
    assert [(name, parse_name(name).repo) for name, _ in rows] == rows


SPELLINGS = {
    "QWEN3:8B": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:8b-q4_K_M": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:8b-q6_K": "Qwen/Qwen3-8B-GGUF:Q6_K",
    "qwen3:8b-fp16": "Qwen/Qwen3-8B",
    "qwen3:4b-instruct-2507-q4_K_M": "unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M",
    "qwen3:4b-thinking-2507-fp16": "Qwen/Qwen3-4B-Thinking-2507",
    "llama3.2:3b-instruct-q4_K_M": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.2:3b-instruct-q8_0": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q8_0",
    "llama3.2:3b-instruct-fp16": "unsloth/Llama-3.2-3B-Instruct",
    "gemma3:4b-it-qat": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:4b-it-q4_K_M": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "qwen2.5-coder:7b-instruct": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "llama2:7b-chat-fp16": "unsloth/llama-2-7b-chat",
    "qwen3:30b-a3b-instruct-2507-q4_K_M": "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M",
    "qwen3:30b-a3b-q4_K_M": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    "qwen3:4b-q8_0": "Qwen/Qwen3-4B-GGUF:Q8_0",
    "mistral:7b-instruct-v0.3-q4_K_M": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "mistral:7b-instruct-v0.3-fp16": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo:12b-instruct-2407-q5_K_M": "bartowski/Mistral-Nemo-Instruct-2407-GGUF:Q5_K_M",
    "deepseek-r1:8b-0528-qwen3-q4_K_M": "unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF:Q4_K_M",
    "deepseek-r1:70b-llama-distill-q4_K_M": "unsloth/DeepSeek-R1-Distill-Llama-70B-GGUF:Q4_K_M",
    "phi3:14b-medium-128k-instruct-q4_K_M": "bartowski/Phi-3-medium-128k-instruct-GGUF:Q4_K_M",
    "olmo2:7b-1124-instruct-q4_K_M": "allenai/OLMo-2-1124-7B-Instruct-GGUF:Q4_K_M",
    "deepseek-coder-v2:16b-lite-instruct-q4_K_M": "bartowski/DeepSeek-Coder-V2-Lite-Instruct-GGUF:Q4_K_M",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_tag_is_read_as_ollama_spells_it(name):
    assert str(parse_name(name)) == SPELLINGS[name]


def test_names_resolve_in_any_case_and_with_the_tag_latest():
    for name in catalog():
        meant = parse_name(name)
        for spelling in (name.upper(), name.title(), f"{name}:latest"):
            again = parse_name(spelling)
            assert again == meant
            assert getattr(again, "entry", None) == getattr(meant, "entry", None)


IN_4_BITS = [entry for entry in OF_THE_HUB if entry.quant in FOUR_BITS]
OTHERS_INSTRUCT = [name.removesuffix("-instruct") for name in catalog() if name.endswith("-instruct")]


@pytest.mark.parametrize("entry", IN_4_BITS, ids=names(IN_4_BITS))
def test_names_accept_the_tags_of_ollama(entry):
    """With a format, a name is unambiguous; `qwen3:4b` without one is a later model than `qwen3:4b-q4_K_M`."""
    name = entry.name.removesuffix("-q4_k_m")
    spellings = [f"{name}-q4_K_M", f"{name}-int4", f"{name}-it-qat", f"{name}-it-q4_K_M", f"{name}-chat-Q4_K_M"]
    if name not in OTHERS_INSTRUCT:
        spellings += [f"{name}-instruct-q4_K_M", f"{name}-instruct-2507-q4_K_M"]
    for spelling in spellings:
        repo = parse_name(spelling)
        assert repo == RepoName(entry.repo, entry.revision, entry.quant)
        assert repo.entry is None
    assert parse_name(f"{name}-q6_K") == RepoName(entry.repo, entry.revision, "Q6_K")
    if published := catalog().get(f"{name}-bf16"):
        assert parse_name(f"{name}-fp16").repo == parse_name(f"{name}-it-F16").repo == published.repo


def test_a_missing_4_bit_file_is_replaced_by_its_twin():
    for entry in IN_4_BITS:
        repo = parse_name(entry.name)
        [twin] = set(FOUR_BITS) - {entry.quant}
        files = [PurePosixPath(f"x-{quant}.gguf") for quant in (twin, "Q4_K_S", "Q8_0")]
        assert choose_model(files, repo.quant, repo.repo) == files[0]


@pytest.mark.parametrize(
    "name",
    [
        *("llama3.2:3b-text-q4_K_M", "mistral:7b-instruct-v0.2", "qwen3:8b-q4_K_M-x", "qwen3:9b"),
        *("olmo-3:7b-instruct-q4_K_M", "qwen3-next:80b-instruct-q4_K_M", "qwen3-next:80b-a3b-instruct-q4_K_M"),
    ],
)
def test_an_unknown_tag_is_not_guessed(name):
    with pytest.raises(ModelNotFound, match=f"no model is called {name}"):
        parse_name(name)


@pytest.mark.parametrize(
    "name",
    ["-it" * 100_000, "a:" + "-it" * 60, "a:" + "-it" * 12, "x" * 300 + ":8b-q4_k_m"],
    ids=["long", "words", "fewer words", "long name"],
)
def test_hostile_names_are_resolved_quickly(name):
    catalog()  # read once
    with counted_lines() as count:
        assert find_entry(name) is None
    assert count.lines < 1000  # 22 measured


def test_reading_it_takes_no_time():
    code = "import sys; from localllm.hub.catalog import catalog; catalog(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "huggingface_hub", "typer", "rich"} & set(loaded.split())
