"""`rm`, `cp` and `verify`: their output, exit codes and effect on the disk."""

import json
import re

import pytest
import torch

from localllm.checkpoint.kept_layouts import kept_path, model_key, writing
from localllm.formatting import format_bytes
from localllm.hub.resolve import resolve_model
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kept_weights import KeptWeightsWriter
from localllm.settings import Settings
from tests.hub.downloaded import download
from tests.hub.folders import write_model
from tests.hub.models import model_files, weights
from tests.shared import shared

FILES = model_files(**{"tokenizer_config.json": b'{"a": 1}'})
TOTAL = sum(map(len, FILES.values()))
GGUF = {f"tiny-{quant}.gguf": b"GGUF" + weights(seed=i) for i, quant in enumerate(["Q4_K_M", "Q8_0"])}


@pytest.fixture
def tiny(hub):
    """Folder of a model that another program has downloaded."""
    return download(hub, "org/tiny", FILES)


@pytest.fixture
def gguf(hub):
    return download(hub, "org/tiny-GGUF", GGUF)


def damage(file):
    file.resolve().write_bytes(b"\0" * file.stat().st_size)


def test_rm_frees_the_stated_bytes(localllm, tiny):
    code, out, err = localllm("rm", "org/tiny", "--dry-run")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"would remove org/tiny: 9 files, frees 4\d\.\d kB\n", out)
    assert tiny.exists()
    code, out, err = localllm("rm", "org/tiny")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"removed org/tiny: 9 files, frees 4\d\.\d kB\n", out)
    assert not tiny.exists()
    code, _, err = localllm("rm", "org/tiny")
    assert (code, err) == (
        8,
        "error: org/tiny is not on this machine; `localllm list` shows the models that are\n",
    )


def test_rm_removes_several_only_if_all_exist(localllm, tiny, gguf):
    code, out, _ = localllm("rm", "org/tiny", "org/nothing")
    assert (code, out, tiny.exists()) == (8, "", True)
    code, out, err = localllm("rm", "org/tiny-GGUF")
    assert (code, out) == (2, "")
    assert "name those to remove: org/tiny-GGUF:Q4_K_M, org/tiny-GGUF:Q8_0" in err
    code, out, _ = localllm("rm", "org/tiny", "org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q4_K_M", "--json")
    first, second, third = json.loads(out)
    assert first["freed_bytes"] >= TOTAL
    assert (second["files"], second["freed_bytes"]) == (["tiny-Q8_0.gguf"], len(GGUF["tiny-Q8_0.gguf"]))
    assert third["files"] == ["tiny-Q4_K_M.gguf"]
    assert not (tiny.exists() or gguf.exists())


def test_rm_reports_shared_files_that_stay(localllm, tiny, hub):
    download(hub, "org/tiny", FILES | {"config.json": b"{ }"}, "v1")
    code, out, _ = localllm("rm", "org/tiny@v1", "--dry-run", "--json")
    [plan] = json.loads(out)
    assert (code, plan["files"], plan["freed_bytes"], plan["dry_run"]) == (0, ["config.json"], 3, True)
    assert {kept["path"]: kept["bytes"] for kept in plan["kept"]} == {
        path: len(body) for path, body in FILES.items() if path != "config.json"
    }
    code, out, _ = localllm("rm", "org/tiny@v1")
    assert re.fullmatch(
        r"removed org/tiny@v1: 1 file, frees 3 B\nkept 40\.\d kB: revision main has it, too\n", out
    )
    assert (tiny / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_rm_refuses_models_that_were_not_downloaded(localllm, model):
    code, _, err = localllm("rm", "demo")
    assert (code, "is part of localllm and stays" in err) == (2, True)
    code, _, err = localllm("rm", model)
    assert (code, f"delete it: `rm -r {model}`" in err) == (2, True)


def test_cp_gives_a_name_that_every_command_knows_and_rm_takes_it_back(localllm, tiny):
    assert localllm("cp", "org/tiny", "mine")[:2] == (0, "mine is org/tiny\n")
    assert json.loads(localllm("show", "mine", "--json")[1])["path"] == str(tiny)
    assert resolve_model("mine").path == tiny
    code, out, _ = localllm("rm", "mine", "--dry-run")
    assert (code, out) == (0, "would remove the name mine of org/tiny; the model stays\n")
    assert resolve_model("mine").path == tiny
    assert json.loads(localllm("rm", "mine", "--json")[1]) == [
        {"name": "mine", "alias_of": "org/tiny", "freed_bytes": 0, "dry_run": False}
    ]
    assert tiny.exists()
    code, _, err = localllm("show", "mine")
    assert (code, "no model is called mine" in err) == (8, True)


def test_list_shows_the_names_that_were_given(localllm, tiny):
    localllm("cp", "org/tiny", "mine")
    localllm("cp", "demo", "boxed")
    localllm("cp", "org/nothing:Q8_0", "far")
    entries = {entry["name"]: entry for entry in json.loads(localllm("list", "--json")[1])}
    assert (entries["mine"]["state"], entries["mine"]["path"]) == ("downloaded", str(tiny))
    assert entries["boxed"]["path"] == entries["demo"]["path"]
    assert (entries["far"]["state"], entries["far"]["repo"]) == ("not here", "org/nothing")


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("qwen3:0.6b", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
        ("Qwen3:0.6b-FP16", "Qwen/Qwen3-0.6B"),
        ("demo", "demo"),
        ("hf.co/org/tiny:Q8_0", "org/tiny:Q8_0"),
        ("org/tiny@v1", "org/tiny@v1"),
    ],
)
def test_cp_fixes_what_an_alias_resolves_to(localllm, source, meant):
    assert json.loads(localllm("cp", source, "mine", "--json")[1]) == {"name": "mine", "source": meant}
    assert localllm("cp", "mine", "another")[1] == f"another is {meant}\n"  # not a name of a name


def test_cp_of_a_path_holds_in_every_folder(localllm, tmp_path, monkeypatch):
    write_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert localllm("cp", "./tiny", "mine")[:2] == (0, f"mine is {tmp_path / 'tiny'}\n")
    monkeypatch.chdir("/")
    assert resolve_model("mine").path == tmp_path / "tiny"
    code, _, err = localllm("cp", "./nothing", "mine")
    assert (code, "there is no folder or file ./nothing" in err) == (8, True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("demo", "demo is already a name of `localllm list --all`"),
        ("qwen3:0.6b", "is already a name"),
        ("here", "here would be read as the path of a file or folder"),
        ("x.gguf", "read as the path"),
        ("org/name", "'org/name' is not a valid name"),
        ("../up", "is not a valid name"),
        ("a b", "is not a valid name"),
        ("", "is not a valid name"),
        ("x\n", "is not a valid name"),
    ],
)
def test_cp_never_shadows_a_model(localllm, tmp_path, monkeypatch, name, words):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = localllm("cp", "demo", name)
    assert (code, out) == (2, "")
    assert words in err


def test_a_damaged_list_of_names_says_what_to_do(localllm, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "aliases.json").write_text("{")
    for command in (["list"], ["show", "mine"], ["rm", "demo"], ["cp", "demo", "mine"]):
        code, _, err = localllm(*command)
        assert (code, "correct it, or delete it to remove all aliases" in err) == (7, True)


def test_verify_of_intact_models(localllm, tiny, gguf):
    code, out, err = localllm("verify")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["NAME", "FILES", "SIZE", "STATE"],
        ["org/tiny", "9", "40.4", "kB", "good"],
        ["org/tiny-GGUF", "2", "80.2", "kB", "good"],
    ]
    [found] = json.loads(localllm("verify", "org/tiny-GGUF:Q8_0", "--json")[1])
    assert found["files"] == [
        {
            "path": "tiny-Q8_0.gguf",
            "bytes": len(GGUF["tiny-Q8_0.gguf"]),
            "state": "good",
            "fetched_again": False,
        }
    ]


def test_verify_finds_and_mends(localllm, tiny):
    damage(tiny / "model.safetensors")
    code, out, err = localllm("verify", "org/tiny", "--check")
    assert code == 7
    assert out.splitlines()[1].split()[4:] == ["1", "damaged"]
    assert err.splitlines() == [
        "org/tiny: model.safetensors is damaged",
        "error: model.safetensors of org/tiny is damaged or missing; "
        "download them again: `localllm verify org/tiny`",
    ]
    code, out, err = localllm("verify", "org/tiny")
    assert (code, out.splitlines()[1].split()[4:]) == (0, ["1", "downloaded", "again"])
    assert (tiny / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    damage(tiny / "model.safetensors")
    [found] = json.loads(localllm("verify", "--json")[1])
    assert [file["path"] for file in found["files"] if file["fetched_again"]] == ["model.safetensors"]
    assert {file["state"] for file in found["files"]} == {"good"}


def test_verify_all_does_not_resume_partial_downloads(localllm, tiny, hub):
    (tiny / "model.safetensors").resolve().unlink()
    before = len(hub.requests)
    code, out, err = localllm("verify")
    assert (code, err) == (0, "org/tiny is incomplete; `localllm pull org/tiny` resumes the download\n")
    assert "1 missing" in out
    assert len(hub.requests) == before
    assert localllm("verify", "org/tiny")[0] == 0
    assert (tiny / "model.safetensors").is_file()


def test_verify_offline_reports_remaining_damage(localllm, tiny, gguf, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    damage(tiny / "model.safetensors")
    damage(gguf / "tiny-Q8_0.gguf")
    (tiny / "config.json").resolve().unlink()
    code, out, err = localllm("verify", "--json")
    assert code == 7
    assert err.splitlines()[-1] == (
        "error: 3 files of org/tiny and 1 more are damaged or missing, and the download failed: "
        "HF_HUB_OFFLINE is set; unset it to repair the files"
    )
    assert [sum(file["state"] != "good" for file in found["files"]) for found in json.loads(out)] == [2, 1]


def test_verify_checks_downloads_only(localllm, model):
    for name in ("demo", model):
        code, _, err = localllm("verify", name)
        assert (code, "is not from the Hub" in err) == (2, True)
    code, _, err = localllm("verify", "org/tiny")
    assert (code, "run `localllm pull org/tiny`" in err) == (8, True)
    assert localllm("verify")[:2] == (0, "NAME  FILES  SIZE  STATE\n")


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Writes a kept layout of a model, and returns its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def keep(model):
        cache = Settings.from_environment().cache
        path = kept_path(cache, model_key(model), "0" * 24)
        with writing(path):
            writer = KeptWeightsWriter(path, model)
            q = torch.ones(1, 8, 16, 4, dtype=torch.uint8)
            scale = torch.ones(1, 2, 16, dtype=torch.float16)
            writer.add("matrix", [QuantizedTensor("int4_lanes", (16, 64), {"q": q, "scale": scale}, 32)])
            assert writer.finish()
        return path

    return keep


def test_rm_takes_the_kept_layout_along(localllm, tiny, gguf, keep):
    files = [keep(tiny), keep(gguf / "tiny-Q8_0.gguf"), keep(gguf / "tiny-Q4_K_M.gguf")]
    sizes = [file.stat().st_size for file in files]
    code, out, _ = localllm("rm", "org/tiny", "--dry-run", "--json")
    [plan] = json.loads(out)
    assert (code, plan["layout_bytes"], plan["freed_bytes"] >= TOTAL + sizes[0]) == (0, sizes[0], True)
    assert all(file.exists() for file in files)
    code, out, _ = localllm("rm", "org/tiny")
    assert re.fullmatch(r"removed org/tiny: 9 files and its kept layout, frees 5\d\.\d kB\n", out)
    code, out, _ = localllm("rm", "org/tiny-GGUF:Q8_0")
    assert [file.exists() for file in files] == [False, False, True]


def test_the_kept_layout_of_weights_that_stay_stays(localllm, tiny, hub, keep):
    path = keep(tiny)
    download(hub, "org/tiny", FILES | {"config.json": b"{ }"}, "v1")
    localllm("rm", "org/tiny@v1")
    assert path.exists()


def test_rm_of_a_kept_layout_alone(localllm, tiny, keep):
    file = shared("gguf/model-q8_0.gguf")
    path = keep(file)
    size = path.stat().st_size
    code, out, _ = localllm("show", str(file))
    assert f"kept layout     {format_bytes(size)} in {path}\n" in out
    code, out, _ = localllm("show", str(file), "--json")
    assert json.loads(out)["layouts"] == [{"path": str(path), "bytes": size}]
    code, _, err = localllm("rm", "--layout", str(file), "org/tiny")
    assert (code, err.partition(";")[0]) == (8, "error: no layout of org/tiny is kept")
    assert path.exists()
    code, out, _ = localllm("rm", "--layout", str(file), "--dry-run", "--json")
    removed = {"name": str(file), "paths": [str(path)], "freed_bytes": size}
    assert json.loads(out) == [removed | {"dry_run": True}]
    code, out, _ = localllm("rm", "--layout", str(file))
    assert (code, out) == (0, f"removed the kept layout of {file}, frees {format_bytes(size)}\n")
    assert file.exists() and not path.exists()
    code, _, err = localllm("rm", "--layout", "--quant", "int8", "org/tiny")
    assert (code, "remove different files" in err) == (2, True)
