"""Choice of the edition for a catalogue name without a format."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from localllm.cli import loading, pull
from localllm.formatting import format_bytes
from localllm.hub.catalog import PACKAGE_FOLDER, catalog, editions_of
from localllm.hub.local_names import read_aliases
from localllm.hub.names import parse_name
from localllm.hub.pull import plan_pull
from localllm.hub.resolve import edition_in_cache, resolve_model
from localllm.llm import edition_choice
from localllm.plan.fit import FreeMemory
from tests.gguf_writer import Kind, write_gguf
from tests.tiny import make_checkpoint

DEMO = PACKAGE_FOLDER / "boxed" / "demo"
MB, GB = 10**6, 10**9
FAST, SLOW = 10_000 * GB, 0.001 * GB  # bytes per second; qwen3:0.6b is fast in every edition, or in none
IN_4_BITS, IN_8_BITS, PUBLISHED = "unsloth/Qwen3-0.6B-GGUF", "Qwen/Qwen3-0.6B-GGUF", "Qwen/Qwen3-0.6B"
KINDS = {"Q3_K_S": Kind.Q4_0, "Q4_K_M": Kind.Q5_0, "Q8_0": Kind.Q8_0}  # so that the sizes differ as the names say
SIZES = {
    "vocab_size": 3072,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "head_dim": 32,
    "num_attention_heads": 8,
}


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """A random model of 9 million parameters in 16 bits, with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("original")
    model = make_checkpoint(folder, "Llama", max_position_embeddings=4096, bos_token_id=0, **SIZES)
    model.bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def ggufs(original) -> dict[str, bytes]:
    """GGUF files of the model, by format."""
    for tag, kind in KINDS.items():
        write_gguf(original, original.with_name(f"{tag}.gguf"), kind)
    return {tag: original.with_name(f"{tag}.gguf").read_bytes() for tag in KINDS}


@pytest.fixture
def published(hub, original, ggufs):
    """qwen3:0.6b in three repositories on the Hub, each with a small model."""
    hub.add(IN_4_BITS, {f"Qwen3-0.6B-{tag}.gguf": ggufs[tag] for tag in ("Q3_K_S", "Q4_K_M")})
    hub.add(IN_8_BITS, {"Qwen3-0.6B-Q8_0.gguf": ggufs["Q8_0"]})
    hub.add(PUBLISHED, original)
    return hub


@pytest.fixture
def machine(monkeypatch):
    def resize(memory: float, bandwidth: float | None) -> None:
        measured = FreeMemory("cpu", int(memory), bandwidth)
        monkeypatch.setenv("LOCALLLM_DTYPE", "float32")
        monkeypatch.setattr(pull, "total_memory", lambda device: measured)
        monkeypatch.setattr(loading, "free_memory", lambda device: measured)

    return resize


@pytest.mark.parametrize(
    ("memory", "bandwidth", "name", "edition", "other"),
    [
        (8 * GB, SLOW, "qwen3:0.6b-q4_k_m", "the Q4_K_M GGUF", "qwen3:0.6b-bf16 for the original"),
        (8 * GB, FAST, "qwen3:0.6b-bf16", "the original", "qwen3:0.6b-q4_k_m for 4 bits"),
        (35 * MB, FAST, "qwen3:0.6b-q8_0", "the Q8_0 GGUF", "qwen3:0.6b-bf16 for the original"),
    ],
    ids=["slow", "fast", "little memory"],
)
def test_pull_chooses_an_edition_by_memory_and_speed(
    published, machine, localllm, memory, bandwidth, name, edition, other
):
    machine(memory, bandwidth)
    code, out, err = localllm("pull", "qwen3:0.6b")
    size = re.escape(format_bytes(sum_of_sizes(published, parse_name(name))))
    line = rf"qwen3:0\.6b: {edition}, {size}, fits with 4,096 tokens of context; {other}\npulling "
    assert code == 0
    assert re.match(line, err), err
    assert resolve_model(name).path == resolve_model("qwen3:0.6b").path == Path(out.strip())
    asked = len(published.requests)
    assert localllm("show", "qwen3:0.6b", "--json")[0] == 0
    assert len(published.requests) == asked


def sum_of_sizes(hub, repo) -> int:
    """Bytes of the files that a pull of a repository downloads."""
    return plan_pull(repo, print).total_bytes


def test_a_format_in_the_name_overrides_the_choice(published, machine, localllm):
    machine(8 * GB, FAST)
    for name in ("qwen3:0.6b-q4_K_M", "qwen3:0.6b-int4", "Qwen3:0.6b-instruct-Q4_K_M"):
        code, out, err = localllm("pull", name)
        assert (code, out.endswith("Qwen3-0.6B-Q4_K_M.gguf\n"), "tokens of context" in err) == (0, True, False)
    assert published.sent("Q8_0") == published.sent("model.safetensors") == 0


@pytest.mark.parametrize("name", ["qwen3:0.6b-bf16", "qwen3:0.6b-q8_0", "qwen3:0.6b-q4_k_m"])
def test_a_downloaded_edition_is_used_and_updated(published, machine, localllm, name):
    machine(8 * GB, FAST)
    path = localllm("pull", name)[1]
    machine(8 * GB, SLOW)
    code, out, err = localllm("pull", "qwen3:0.6b")
    assert (code, out) == (0, path)
    assert "is up to date" in err
    entry = json.loads(localllm("show", "qwen3:0.6b", "--json")[1])
    assert (entry["name"], entry["state"], entry["repo"]) == ("qwen3:0.6b", "downloaded", parse_name(name).repo)
    listed = {entry["name"]: entry["path"] for entry in json.loads(localllm("list", "--json")[1])}
    assert listed["qwen3:0.6b"] == path.strip()


def test_of_several_downloaded_editions_the_4_bit_one_is_used(published, machine, localllm):
    machine(8 * GB, FAST)
    paths = [localllm("pull", f"qwen3:0.6b-{format}")[1].strip() for format in ("bf16", "q8_0", "q4_k_m")]
    assert str(resolve_model("qwen3:0.6b").path) == paths[-1]


def test_cp_verify_and_rm_apply_to_the_downloaded_edition(published, machine, localllm):
    machine(8 * GB, FAST)
    localllm("pull", "qwen3:0.6b")
    assert localllm("cp", "qwen3:0.6b", "mine")[0] == 0
    assert read_aliases() == {"mine": PUBLISHED}
    assert PUBLISHED in localllm("verify", "qwen3:0.6b")[1]
    code, out, _ = localllm("rm", "qwen3:0.6b")
    assert (code, out.startswith(f"removed {PUBLISHED}: 5 files")) == (0, True)
    assert edition_in_cache(parse_name("qwen3:0.6b")) == parse_name("qwen3:0.6b-q4_k_m")


def test_editions_missing_on_the_hub_are_skipped(hub, ggufs, original, machine, localllm):
    hub.add("unsloth/Qwen3-4B-Instruct-2507-GGUF", {"Qwen3-4B-Q8_0.gguf": ggufs["Q8_0"], "x.gguf": b"?"})
    machine(8 * GB, FAST)
    code, _, err = localllm("pull", "qwen3:4b-instruct")
    assert (code, "has no model Q4_K_M" in err) == (0, False), err
    assert err.startswith("qwen3:4b-instruct: the Q8_0 GGUF, ")
    hub.add(IN_4_BITS, {"Qwen3-0.6B-UD-Q4_K_M.gguf": ggufs["Q4_K_M"]})
    hub.add(PUBLISHED, original, gated="manual")
    code, _, err = localllm("pull", "qwen3:0.6b")
    assert (code, err.startswith("qwen3:0.6b: the UD-Q4_K_M GGUF, ")) == (0, True), err


def test_models_from_10_billion_parameters_are_always_in_4_bits(hub, ggufs, machine, localllm):
    hub.add("Qwen/Qwen3-14B-GGUF", {f"Qwen3-14B-{tag}.gguf": ggufs[tag] for tag in KINDS})
    hub.add("Qwen/Qwen3-8B-GGUF", {f"Qwen3-8B-{tag}.gguf": ggufs[tag] for tag in KINDS})
    machine(8 * GB, FAST)
    assert localllm("pull", "qwen3:14b")[2].startswith("qwen3:14b: the Q4_K_M GGUF, ")
    assert localllm("pull", "qwen3")[2].startswith("qwen3:8b: the Q8_0 GGUF, ")


def test_the_error_names_a_smaller_edition_that_fits(published, machine, localllm):
    header = 2**21
    machine(11.2 * MB, SLOW)
    code, out, err = localllm("pull", "qwen3:0.6b")
    assert (code, out) == (3, "")
    assert re.fullmatch(
        r"error: a context of 16 tokens needs .* after the step; what fits: qwen3:0\.6b-q3_k_s, "
        r"\d\.\d\d MB; --force downloads it anyway\n",
        err,
    ), err
    assert published.sent(r"Q4_K_M\.gguf") <= 2 * header


def test_the_smaller_model_in_the_error_is_the_largest_that_fits():
    for gigabytes, name in ((12, "qwen3:14b"), (6.5, "qwen3:8b"), (2.1, "qwen3:1.7b"), (1.3, None)):
        smaller = edition_choice._smaller_model(catalog()["qwen3:32b"], int(gigabytes * GB))
        assert (smaller.name if smaller else None) == name


def test_a_wrong_size_in_the_catalogue_does_not_prevent_a_pull(published, machine, localllm, monkeypatch):
    entry = dataclasses.replace(catalog()["qwen3:0.6b"], bytes=10**15, parameters="900B")
    monkeypatch.setitem(catalog(), "qwen3:0.6b", entry)
    machine(8 * GB, FAST)
    assert localllm("pull", "qwen3:0.6b")[2].startswith("qwen3:0.6b: the Q4_K_M GGUF, ")


def test_plan_predicts_the_edition_that_the_device_would_get(published, machine, localllm):
    machine(8 * GB, SLOW)
    plans = [localllm("plan", "qwen3:0.6b", *flags, "--json")[1] for flags in ((), ("--gpu", "h100"))]
    assert [json.loads(plan)["model"] for plan in plans] == ["qwen3:0.6b", "qwen3:0.6b-bf16"]


def test_json_events_do_not_include_the_choice(published, machine, localllm):
    machine(8 * GB, FAST)
    code, out, err = localllm("pull", "qwen3:0.6b", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err, events[0]["event"], events[0]["repo"]) == (0, "", "begin", PUBLISHED)
    assert {event["event"] for event in events} <= {"begin", "progress", "verified", "done"}


def test_run_loads_the_edition_that_it_downloads(published, machine, real):
    machine(8 * GB, FAST)
    flags = ("Hello", "--max-tokens", "4", "--raw", "--temperature", "0")
    code, out, err = real("run", "qwen3:0.6b", *flags)
    assert (code, err.startswith("qwen3:0.6b: the original, ")) == (0, True), err
    assert real("run", "qwen3:0.6b-bf16", *flags)[1:] == (out, "")
    assert real("run", "qwen3:0.6b", *flags)[1:] == (out, "")


def test_quant_downloads_the_published_model(published, machine, localllm):
    machine(8 * GB, SLOW)
    err = localllm("run", "qwen3:0.6b", "Hello", "--quant", "int8")[2]
    assert err.startswith("qwen3:0.6b: the original, "), err


def test_each_edition_has_a_name_that_resolves_to_it():
    entries = [entry for entry in catalog().values() if entry.quant in ("Q4_K_M", "UD-Q4_K_M")]
    assert len(entries) > 100
    for entry in entries:
        for edition in editions_of(entry):
            repo = parse_name(edition.name)
            assert (repo.repo, repo.quant) == (edition.repo, edition.quant)
            assert (repo.entry is None) == (edition is not entry or edition.name.endswith("q4_k_m"))
