import json
from pathlib import Path

import pytest

from localllm.cli import models
from tests.hub.folders import write_cached, write_model


def rows(text):
    return {line.split()[0]: line for line in text.splitlines()}


def test_list_shows_downloaded_models_first(localllm, tmp_path):
    write_cached(tmp_path / "cache", "Qwen/Qwen3-4B")
    write_cached(tmp_path / "cache", "someone/their-model")
    write_cached(tmp_path / "cache", "an/encoder", architectures=["BertModel"])
    write_cached(tmp_path / "cache", "an/oddity", architectures=[3])
    write_cached(tmp_path / "cache", "someone/hearing", architectures=["XForConditionalGeneration"])
    write_cached(tmp_path / "cache", "someone/seeing", architectures=["XForConditionalGeneration"], text_config={})
    (write_cached(tmp_path / "cache", "Qwen/Qwen3-8B") / "model.safetensors").unlink()
    code, out, err = localllm("list", "--all")
    assert (code, err) == (0, "")
    table = rows(out)
    assert "downloaded" in table["qwen3:4b-bf16"]
    assert "downloaded" in table["someone/their-model"]
    assert "incomplete" in table["qwen3:8b-bf16"]
    assert "not here" in table["qwen3:0.6b-bf16"]
    assert not {"an/encoder", "an/oddity", "someone/hearing"} & table.keys()
    assert "unsupported" in table["someone/seeing"]
    here = [name for name, line in table.items() if "downloaded" in line]
    assert set(list(table)[: len(here) + 3]) >= {
        "NAME",
        *here,
    }  # the boxed model and one that does not run are here, too


def test_without_all_only_downloaded_models_are_listed(localllm, tmp_path):
    write_cached(tmp_path / "cache", "Qwen/Qwen3-4B")
    (write_cached(tmp_path / "cache", "Qwen/Qwen3-8B") / "model.safetensors").unlink()
    code, out, err = localllm("list")
    assert (code, set(rows(out)), err) == (0, {"NAME", "demo", "qwen3:4b-bf16", "qwen3:8b-bf16"}, "")
    assert [entry["name"] for entry in json.loads(localllm("list", "--json")[1])] == [
        "demo",
        "qwen3:4b-bf16",
        "qwen3:8b-bf16",
    ]


def test_list_as_json_has_the_same_models(localllm, tmp_path):
    write_cached(tmp_path / "cache", "Qwen/Qwen3-4B")
    entries = {entry["name"]: entry for entry in json.loads(localllm("list", "--all", "--json")[1])}
    assert entries["qwen3:4b-bf16"]["state"] == "downloaded"
    assert entries["qwen3:4b-bf16"]["weight_bytes"] == 24
    assert (
        entries["qwen3:0.6b-bf16"] | {"path": None, "repo": "Qwen/Qwen3-0.6B", "weight_bytes": None}
        == entries["qwen3:0.6b-bf16"]
    )


def test_list_shows_the_download_size(localllm):
    assert "~16 GB" in rows(localllm("list", "--all")[1])["qwen3:8b-bf16"]
    entries = {entry["name"]: entry for entry in json.loads(localllm("list", "--all", "--json")[1])}
    assert entries["qwen3:8b-bf16"]["download_bytes"] == 16_000_000_000
    assert "qwen3" not in entries  # a second name is no second model


def test_of_a_repository_of_gguf_files_each_model_is_listed_once(localllm, tmp_path):
    folder = write_cached(tmp_path / "cache", "Qwen/Qwen3-8B-GGUF")
    for quant in ("Q4_K_M", "Q8_0"):
        (folder / f"Qwen3-8B-{quant}.gguf").write_bytes(b"GGUF")
    listed = [e for e in json.loads(localllm("list", "--all", "--json")[1]) if e["repo"] and e["path"]]
    assert {entry["repo"] for entry in listed} == {"Qwen/Qwen3-8B-GGUF"}
    paths = {entry["name"]: entry["path"] for entry in listed}
    assert paths == {
        "qwen3:8b": str(folder / "Qwen3-8B-Q4_K_M.gguf"),
        "Qwen/Qwen3-8B-GGUF:Q8_0": str(folder / "Qwen3-8B-Q8_0.gguf"),
    }


def test_one_damaged_model_does_not_hide_the_others(localllm, tmp_path):
    (write_cached(tmp_path / "cache", "Qwen/Qwen3-4B") / "model.safetensors").write_bytes(b"x")
    index = write_cached(tmp_path / "cache", "Qwen/Qwen3-8B") / "model.safetensors.index.json"
    index.with_name("model.safetensors").rename(index)
    code, out, _ = localllm("list", "--all")
    assert code == 0
    assert "damaged" in rows(out)["qwen3:8b-bf16"]
    assert "damaged" in rows(out)["qwen3:4b-bf16"]
    code, out, err = localllm("show", "qwen3:4b-bf16")
    assert (code, out) == (7, "")
    assert "model.safetensors is damaged" in err


def test_show_of_a_folder(localllm, model):
    code, out, err = localllm("show", model)
    assert (code, err) == (0, "")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("chat"))
    assert facts["name"] == "tiny"
    assert facts["state"] == "folder"
    assert facts["context"] == "4096 tokens"
    assert facts["sampling"] == "temperature=0.6 top_k=20"


def test_show_of_a_download(localllm, tmp_path):
    folder = write_cached(tmp_path / "cache", "someone/their-model")
    shown = json.loads(localllm("show", "someone/their-model", "--json")[1])
    assert shown["state"] == "downloaded"
    assert Path(shown["path"]) == folder
    assert shown["sampling"] == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    "name", ["someone/their-model@main", "https://huggingface.co/someone/their-model", "hf.co/someone/their-model"]
)
def test_show_of_a_download_by_all_that_names_it(localllm, tmp_path, name):
    write_cached(tmp_path / "cache", "someone/their-model")
    shown = json.loads(localllm("show", name, "--json")[1])
    assert (shown["name"], shown["state"]) == ("someone/their-model", "downloaded")
    assert shown["repo"] == "someone/their-model"


def test_show_of_one_gguf_model_of_several(localllm, tmp_path):
    folder = write_cached(tmp_path / "cache", "someone/theirs-GGUF")
    (folder / "model.safetensors").unlink()
    for quant in ("Q4_0", "Q8_0"):
        (folder / f"theirs-{quant}.gguf").write_bytes(b"GGUF")
    code, _, err = localllm("show", "someone/theirs-GGUF:q8_0")  # it is found, and looked into
    assert code == 7
    assert "theirs-Q8_0.gguf" in err


def test_show_of_a_missing_model_says_how_to_pull_it(localllm):
    code, out, _ = localllm("show", "llama3.2:1b-bf16")
    assert code == 0
    assert "not here" in out
    assert "unsloth/Llama-3.2-1B-Instruct" in out
    assert "download      ~2.5 GB" in out
    assert "localllm pull llama3.2:1b-bf16" in out


def test_show_of_nothing_is_an_error(localllm):
    code, out, err = localllm("show", "quen3")
    assert (code, out) == (8, "")
    assert "did you mean" in err


@pytest.mark.parametrize("damage", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_show_names_a_damaged_file(localllm, tmp_path, damage):
    folder = write_model(tmp_path / "tiny")
    (folder / damage).write_text("{")
    code, _, err = localllm("show", str(folder))
    assert code == 7
    assert damage in err


def test_a_folder_of_the_same_name_as_an_alias_needs_a_path(localllm, tmp_path, monkeypatch):
    write_model(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert json.loads(localllm("show", "demo", "--json")[1])["state"] == models.State.BUNDLED
    assert json.loads(localllm("show", "./demo", "--json")[1])["state"] == models.State.FOLDER


def test_unsupported_and_damaged_models_are_reported_and_hide_no_others(localllm, tmp_path):
    write_cached(tmp_path / "cache", "Qwen/Qwen3-4B", architectures=["GPT2ForCausalLM"])
    odd = write_cached(tmp_path / "cache", "Qwen/Qwen3-8B")
    (odd / "generation_config.json").write_text('{"temperature": -3}')
    code, out, _ = localllm("list", "--all", "--json")
    states = {entry["name"]: entry["state"] for entry in json.loads(out)}
    assert (code, states["qwen3:4b-bf16"], states["qwen3:8b-bf16"]) == (0, "unsupported", "damaged")
    code, _, err = localllm("show", "qwen3:4b-bf16")
    assert (code, "GPT2ForCausalLM" in err) == (8, True)
    code, _, err = localllm("show", "qwen3:8b-bf16")
    assert (code, "in generation_config.json temperature is -3" in err) == (7, True)
